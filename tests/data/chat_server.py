"""A small HTTP server with OpenAI's chat endpoint, for the tests of what talks to one."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ChatServer:
    """Answers "<n> <last user message>\\n" where n counts the messages it was sent; some prompts misbehave, some
    have it think first or call a tool.

    `token_ids` is what it does when asked for them: "ignore", "refuse" or "tell". A prompt's ids are then the bytes of
    its messages' contents, an answer's those of its text; with "tell anew" a later turn sees earlier ones in capitals.
    """

    def __init__(self, delay_s=0.0, token_ids="ignore"):
        self.requests = []
        self.token_ids = token_ids
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
        asked_for_ids = request.get("return_token_ids")
        if asked_for_ids and self.token_ids == "refuse":
            return 400, {"error": {"message": "unknown: return_token_ids", "type": "BadRequestError", "code": 400}}
        if "refuse" in text:
            return 400, {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}
        finish = (
            "tool_calls" if "call" in text else "abort" if "abort" in text else "length" if "long" in text else "stop"
        )
        message = {"role": "assistant", "content": f" {len(request['messages'])} {text}\n"}
        if "think" in text:
            message["reasoning_content"] = "hm"
        if finish == "tool_calls":
            function = {"name": "add", "arguments": '{"a": 1}'}
            message |= {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        told = {}
        if asked_for_ids and self.token_ids.startswith("tell"):
            seen = [
                m["content"].upper() if "anew" in self.token_ids else m["content"] for m in request["messages"][:-1]
            ]
            told = {"prompt_token_ids": list("".join([*seen, text]).encode())}
            choice["token_ids"] = list(message["content"].encode())
        return 200, {
            **told,
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
