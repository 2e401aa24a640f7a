"""Our own work and our children's is not other load."""

import subprocess
import sys
import time

import pytest

from bench.machine_load import LoadMeter, _own_s

SPIN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ninput()"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_childs_work_is_ours() -> None:
    child = subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE)
    before = _own_s()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    while _own_s() - before < 0.45 and child.poll() is None:
        time.sleep(0.02)
    assert child.poll() is None
    child.communicate(b"\n")


def test_other_load_is_a_number_of_cores_or_unknown() -> None:
    load = LoadMeter().other_cores()
    assert load is None or load >= 0
