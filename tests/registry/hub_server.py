"""A Hub on the loopback: enough of its API for commits, tags, listings and downloads. Content lives
in memory.

`python -m tests.registry.hub_server PORT_FILE` serves until killed and writes its port to that
file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class Repo:
    """Commits (sha → path → bytes) and what names stand for."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {hashlib.sha1(b"").hexdigest(): {}}
        self.names = {"main": next(iter(self.commits))}

    def resolve(self, revision: str) -> str | None:
        return self.names.get(revision, revision if revision in self.commits else None)


class State:
    """What a server holds and saw. `lfs` makes it ask for weights over the LFS path; `cut` breaks
    off downloads."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.lfs = False
        self.cut: int | None = None
        self.rewrite: dict[str, bytes] = {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self._parts()
        if parts[:2] == ["api", "models"]:
            repo = self.state.repos.get("/".join(parts[2:4]))
            revision = parts[5] if parts[4:5] == ["revision"] else "main"
            if parts[4:5] == ["tree"]:
                revision = parts[5]
            sha = None if repo is None else repo.resolve(revision)
            if repo is None or sha is None:
                return self._missing(repo is None)
            files = [
                {"rfilename": n, "size": len(d), "blobId": _oid(d)}
                for n, d in repo.commits[sha].items()
            ]
            if parts[4:5] == ["tree"]:
                rows = [
                    {"type": "file", "path": f["rfilename"], "size": f["size"], "oid": f["blobId"]}
                    for f in files
                ]
                return self._json(rows)
            name = "/".join(parts[2:4])
            return self._json(
                {
                    "id": name,
                    "modelId": name,
                    "sha": sha,
                    "siblings": files,
                    "private": False,
                    "tags": [],
                }
            )
        if len(parts) > 3 and parts[2] == "resolve":
            repo = self.state.repos.get("/".join(parts[:2]))
            sha = None if repo is None else repo.resolve(parts[3])
            name = "/".join(parts[4:])
            if repo is None or sha is None:
                return self._missing(repo is None)
            if name not in repo.commits[sha]:
                return self._bytes(
                    b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}, 404
                )
            data = self.state.rewrite.get(name, repo.commits[sha][name])
            return self._bytes(
                data, {"X-Repo-Commit": sha, "ETag": f'"{_oid(data)}"', "Accept-Ranges": "bytes"}
            )
        self._json({"error": "not found"}, 404)

    def do_PUT(self) -> None:
        self.state.blobs[self._parts()[-1]] = self._body()
        self._json({})

    def do_POST(self) -> None:
        parts, body = self._parts(), self._body()
        if parts == ["api", "validate-yaml"]:
            return self._json({"errors": [], "warnings": []})
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            there = name in self.state.repos
            self.state.repos.setdefault(name, Repo())
            return self._json(
                {"url": f"{self._address()}/{name}", "id": name}, 409 if there else 200
            )
        if parts[2:] == ["info", "lfs", "objects", "batch"]:
            href = f"{self._address()}/lfs/"
            rows = [
                {**o, "actions": {"upload": {"href": href + o["oid"]}}}
                for o in json.loads(body)["objects"]
            ]
            return self._json({"transfer": "basic", "objects": rows})
        repo = self.state.repos.get("/".join(parts[2:4]))
        if repo is None:
            return self._missing(True)
        if parts[4] == "preupload":
            files, rows = repo.commits[repo.names["main"]], []
            for file in json.loads(body)["files"]:
                known = files.get(file["path"])
                oid = None if known is None else _oid(known)
                rows.append(
                    {
                        "path": file["path"],
                        "shouldIgnore": False,
                        "uploadMode": self._mode(file),
                        "oid": oid,
                    }
                )
            return self._json({"files": rows})
        if parts[4] == "tag":
            asked = json.loads(body)
            if asked["tag"] in repo.names:
                return self._json({"error": "tag exists"}, 409)
            repo.names[asked["tag"]] = repo.resolve(parts[5]) or ""
            return self._json({})
        if parts[4] == "commit":
            return self._commit(repo, [json.loads(line) for line in body.splitlines()])
        self._json({"error": "not found"}, 404)

    def _commit(self, repo: Repo, lines: list[dict[str, Any]]) -> None:
        head, files = repo.names["main"], dict(repo.commits[repo.names["main"]])
        for line in lines:
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit") not in (None, head):
                return self._json({"error": "the branch has moved"}, 412)
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                files[value["path"]] = self.state.blobs[value["oid"]]
            if line["key"] == "deletedFile":
                del files[value["path"]]
        sha = hashlib.sha1(
            json.dumps([head, {n: _oid(d) for n, d in sorted(files.items())}]).encode()
        ).hexdigest()
        repo.commits[sha], repo.names["main"] = files, sha
        self._json(
            {
                "success": True,
                "commitOid": sha,
                "commitUrl": f"{self._address()}/org/pair/commit/{sha}",
                "hookOutput": "",
            }
        )

    def _address(self) -> str:
        return f"http://127.0.0.1:{self.connection.getsockname()[1]}"

    def _mode(self, file: dict[str, Any]) -> str:
        return "lfs" if self.state.lfs and file["path"].endswith(".safetensors") else "regular"

    def _parts(self) -> list[str]:
        self.state.requests.append(f"{self.command} {self.path}")
        return [unquote(p) for p in urlsplit(self.path).path.strip("/").split("/")]

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _missing(self, whole: bool) -> None:
        code = "RepoNotFound" if whole else "RevisionNotFound"
        self._bytes(b"{}", {"X-Error-Code": code, "X-Error-Message": "not there"}, 404)

    def _json(self, body: Any, status: int = 200) -> None:
        self._bytes(json.dumps(body).encode(), {"Content-Type": "application/json"}, status)

    def _bytes(self, data: bytes, headers: dict[str, str], status: int = 200) -> None:
        start = 0
        if status == 200 and (asked := self.headers.get("Range")):
            start, status = int(asked.removeprefix("bytes=").split("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data) - start)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            sent = data[start:]
            if self.state.cut is not None and len(sent) > self.state.cut and "ETag" in headers:
                sent, self.close_connection, self.state.cut = sent[: self.state.cut], True, None
            self.wfile.write(sent)


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Server(ThreadingHTTPServer):
    """One that does not mind clients that vanish."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@contextmanager
def serve() -> Iterator[tuple[str, State]]:
    """Address and state of a server that runs until the block ends."""
    state = State()
    server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"state": state}))
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    """Serves in the foreground."""
    with serve() as (address, _):
        Path(sys.argv[1]).write_text(address)
        threading.Event().wait()


if __name__ == "__main__":
    main()
