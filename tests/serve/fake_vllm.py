"""Environments that hold a stand-in for vLLM: a real interpreter, package metadata, and a server with a child process.

vLLM is an outside program. The stand-in is as much of it as starting, waiting, explaining and ending need.
"""

import sys
import venv
from pathlib import Path

MAIN = """
import http.server, json, os, subprocess, sys, time

CHILD = "import os, sys, time\\nparent = os.getppid()\\nwhile os.getppid() == parent: time.sleep(0.05)\\n" \\
    "time.sleep(float(sys.argv[1]))"

def main():
    args = sys.argv[1:]
    port = int(args[args.index("--port") + 1])
    mode = os.environ.get("FAKE_VLLM", "serve")
    if mode == "die":
        print("(EngineCore pid=7) ERROR 12-01 08:46:07 [core.py:133] Traceback (most recent call last):")
        print("(EngineCore pid=7) ERROR 12-01 08:46:07 [core.py:133] ValueError: No room for the KV cache")
        print("(EngineCore pid=7) ERROR 12-01 08:46:07 [core.py:133] ValueError: No room for the KV cache")
        print("RuntimeError: Engine core initialization failed. See root cause above.")
        return 1
    stays = "600" if mode == "orphan" else "0.2"  # after its parent's end
    child = subprocess.Popen([sys.executable, "-c", CHILD, stays])
    open(os.environ["FAKE_PIDS"], "w").write(f"{os.getpid()} {child.pid}")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            known = {"/health": {}, "/version": {"version": "0.32.0"}, "/metrics": {},
                     "/v1/models": {"data": [{"id": args[1], "max_model_len": 99}]}}
            self.send_response(200 if self.path in known else 404)
            self.end_headers()
            self.wfile.write(json.dumps(known.get(self.path)).encode())

        def do_POST(self):
            if mode == "complete":
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps({"usage": {"completion_tokens": asked["max_tokens"]}}).encode())
                return
            open(os.environ["FAKE_PIDS"] + ".asked", "w").close()
            time.sleep(600)

        def log_message(self, *_):
            pass

    print("Application startup complete", flush=True)
    if mode == "quit":
        return 7
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def environment(path: Path, version: str | None = "0.32.0", distribution: str = "vllm") -> Path:
    """A virtual environment with that vLLM in it, or with none."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(path)
    if version:
        packages = path / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        metadata = packages / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        cli = packages / "vllm" / "entrypoints" / "cli"
        cli.mkdir(parents=True)
        (cli / "main.py").write_text(MAIN)
    return path
