"""A small HTTP server with OpenAI's chat endpoint, for the tests of what talks to one."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ChatServer:
    """Answers "<n> <last user message>\\n" where n counts the messages it was sent; some prompts misbehave."""

    def __init__(self, delay_s=0.0):
        self.requests = []
        self.delay_s = delay_s
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.requests.append(request)
                time.sleep(outer.delay_s)
                self.reply(*outer.respond(request))

            def reply(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.reply(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def respond(self, request):
        text = request["messages"][-1]["content"]
        if "refuse" in text:
            return 400, {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}
        finish = "abort" if "abort" in text else "length" if "long" in text else "stop"
        message = {"role": "assistant", "content": f" {len(request['messages'])} {text}\n"}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return 200, {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
