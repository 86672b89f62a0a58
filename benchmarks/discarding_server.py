"""An S3 server that keeps the sizes of what it is sent and nothing else: what sending costs without a disk behind it.

    python benchmarks/discarding_server.py PORT

Knows what an upload asks for: objects in one request or in parts, HEAD, listings. Checks nothing; ETags are made up.
"""

import re
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

ETAG = "0" * 32
SIZES: dict[str, int] = {}
PARTS: dict[str, dict[int, int]] = {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        key, query = self.asked_for()
        size = self.discard()
        if "partNumber" in query:
            PARTS.setdefault(key, {})[int(query["partNumber"][0])] = size
        else:
            SIZES[key] = size
        self.answer(200, headers={"ETag": f'"{ETAG}"'})

    def do_POST(self) -> None:
        key, query = self.asked_for()
        self.discard()
        if "uploadId" in query:
            SIZES[key] = sum(PARTS.pop(key).values())
            self.answer(200, f"<CompleteMultipartUploadResult><ETag>{ETAG}</ETag></CompleteMultipartUploadResult>")
        else:
            self.answer(200, "<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>")

    def do_GET(self) -> None:
        _, query = self.asked_for()
        prefix = query.get("prefix", [""])[0]
        bucket = urlsplit(self.path).path.split("/")[1]
        found = {key.removeprefix(f"{bucket}/"): size for key, size in sorted(SIZES.items())}
        listed = "".join(
            f"<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
            for key, size in found.items()
            if key.startswith(prefix) and "uploads" not in query
        )
        self.answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{listed}</ListBucketResult>")

    def do_HEAD(self) -> None:
        key, _ = self.asked_for()
        self.answer(200 if key in SIZES else 404, size=SIZES.get(key, 0))

    def do_DELETE(self) -> None:
        self.answer(204)

    def asked_for(self) -> tuple[str, dict[str, list[str]]]:
        split = urlsplit(self.path)
        return unquote(split.path).strip("/"), parse_qs(split.query, keep_blank_values=True)

    def discard(self) -> int:
        size = left = int(self.headers.get("Content-Length", 0))
        buffer = memoryview(bytearray(1 << 20))
        while left:
            count = self.rfile.readinto(buffer[: min(left, len(buffer))])
            left -= count
            if not count:
                break
        return size

    def answer(
        self, status: int, text: str = "", headers: dict[str, str] | None = None, size: int | None = None
    ) -> None:
        body = re.sub(r">\s+<", "><", text).encode()
        self.send_response(status)
        self.send_header("x-amz-request-id", "1")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if size is None else size))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer.request_queue_size = socket.SOMAXCONN
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()
