"""A client that is held up notices it, and only what blurs the measurement is refused."""

import asyncio
import time

from bench.client_lag import INTERVAL_S, ClientLag, LagMeter

BUSY_S = 0.1


def test_work_in_the_event_loop_shows_as_lag() -> None:
    async def held_up() -> ClientLag | None:
        with LagMeter() as meter:
            for _ in range(3):
                until = time.perf_counter() + BUSY_S
                while time.perf_counter() < until:
                    pass
                await asyncio.sleep(2 * INTERVAL_S)
        return meter.lag()

    lag = asyncio.run(held_up())
    assert lag is not None
    assert lag.p99_s > BUSY_S / 2
    assert lag.mean_s < lag.p99_s
    assert lag.refusal(0.02) is not None


def test_nothing_to_go_by_is_no_lag() -> None:
    async def at_once() -> ClientLag | None:
        with LagMeter() as meter:
            return meter.lag()

    assert asyncio.run(at_once()) is None


def test_a_lag_is_judged_by_the_chunks_it_blurs() -> None:
    lag = ClientLag(mean_s=0.006, p99_s=0.02, num_samples=100)
    assert lag.refusal(0.05) is None
    assert lag.refusal(None) is None
    refused = lag.refusal(0.01)
    assert refused is not None
    assert "6.0 ms" in refused
    assert "10.0 ms" in refused
    assert ClientLag(0.001, 0.002, 9).refusal(0.002) is None, "that is the operating system's own scheduling"
