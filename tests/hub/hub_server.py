"""A Hub on loopback, as far as huggingface_hub needs one to upload a model and load it again.

Repositories are kept in memory as commits, each a dict from file names to sha256; contents lie in a folder, by sha256.
What was asked is in `requests`, one "METHOD path" each.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


TOKEN = "hf_of_the_test"
LARGE = (".safetensors", ".bin", ".npy")  # large files by their name, as .gitattributes has it on the Hub


class Refused(Exception):
    """A status and the Hub's code for the reason."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message or code)
        self.status, self.code = status, code


class Repository:
    def __init__(self, private: bool) -> None:
        self.private = private
        self.commits: dict[str, dict[str, str]] = {}
        self.branches: dict[str, str] = {}
        self.messages: list[str] = []
        self.commit("main", {}, "initial commit")

    def commit(self, branch: str, files: dict[str, str], message: str) -> str:
        digest = hashlib.sha1(json.dumps([len(self.messages), files]).encode()).hexdigest()
        self.commits[digest], self.branches[branch] = files, digest
        self.messages.append(message)
        return digest

    def resolve(self, revision: str) -> str:
        digest = self.branches.get(revision, revision)
        if digest not in self.commits:
            raise Refused(404, "RevisionNotFound")
        return digest


class HubServer(ThreadingHTTPServer):
    """The server; `with HubServer(folder) as hub:` runs it, `hub.url` is its address.

    Args:
        folder: for the contents.
        part_bytes: a large file beyond this is asked for in parts of this size.

    Attributes:
        takes_commits: False makes every commit fail, after the files have arrived.
    """

    daemon_threads = True

    def __init__(self, folder: Path, part_bytes: int = 2**30) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.part_bytes = folder, part_bytes
        self.takes_commits = True
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def store(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        (self.folder / digest).write_bytes(content)
        return digest

    def read(self, repo_id: str, name: str, revision: str = "main") -> bytes:
        repository = self.repositories[repo_id]
        return (self.folder / repository.commits[repository.resolve(revision)][name]).read_bytes()

    def files(self, repo_id: str, revision: str = "main") -> set[str]:
        repository = self.repositories[repo_id]
        return set(repository.commits[repository.resolve(revision)])

    def write(self, repo_id: str, name: str, content: str, branch: str = "main") -> None:
        """As somebody does on the Hub's page."""
        repository = self.repositories[repo_id]
        files = repository.commits[repository.resolve(branch)]
        repository.commit(branch, {**files, name: self.store(content.encode())}, f"Update {name}")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are sent apart, and the one would wait for the other
    server: HubServer

    def log_message(self, *args: object) -> None:
        pass

    def handle_request(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urlsplit(self.path).path
        try:
            for method, pattern, action in ROUTES:
                if self.command in method.split("|") and (match := re.fullmatch(pattern, path)):
                    action(self, *map(unquote, match.groups()))
                    return
            raise Refused(404, "EntryNotFound", f"this server has no {path}")
        except Refused as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": str(refused)}
            self.answer(json.dumps({"error": str(refused)}).encode(), status=refused.status, headers=headers)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def answer(self, content: bytes = b"", status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def answer_json(self, value: object) -> None:
        self.answer(json.dumps(value).encode(), headers={"Content-Type": "application/json"})

    @property
    def is_owner(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def repository(self, repo_id: str, to_write: bool = False) -> Repository:
        repository = self.server.repositories.get(repo_id)
        if repository is None or (repository.private and not self.is_owner):
            raise Refused(404, "RepoNotFound")
        if to_write and not self.is_owner:
            raise Refused(403, message="the token may not write here")
        return repository

    # Repositories.

    def create(self) -> None:
        request = json.loads(self.body)
        repo_id = f"{request['organization']}/{request['name']}"
        if not self.is_owner:
            raise Refused(401, message="Invalid credentials in Authorization header")
        status = 409 if repo_id in self.server.repositories else 200
        if status == 200:
            private = request.get("visibility") == "private" or request.get("private") is True
            self.server.repositories[repo_id] = Repository(private)
        self.answer(json.dumps({"url": f"{self.server.url}/{repo_id}"}).encode(), status)

    def branch(self, repo_id: str, name: str) -> None:
        repository = self.repository(repo_id, to_write=True)
        if name in repository.branches:
            raise Refused(409, message="Reference already exists")
        repository.branches[name] = repository.branches["main"]
        self.answer_json({})

    def info(self, repo_id: str, revision: str = "main") -> None:
        repository = self.repository(repo_id)
        digest = repository.resolve(revision)
        files = [{"rfilename": name} for name in sorted(repository.commits[digest])]
        self.answer_json({"id": repo_id, "sha": digest, "private": repository.private, "siblings": files})

    def tree(self, repo_id: str, revision: str, folder: str = "") -> None:
        repository = self.repository(repo_id)
        found = [
            {"type": "file", "path": name, "oid": oid, "size": (self.server.folder / oid).stat().st_size}
            for name, oid in repository.commits[repository.resolve(revision)].items()
            if name.startswith(folder.lstrip("/") and f"{folder.strip('/')}/")
        ]
        if folder and not found:
            raise Refused(404, "EntryNotFound")
        self.answer_json(found)

    # Upload.

    def validate_card(self) -> None:
        self.answer_json({"errors": [], "warnings": []})

    def preupload(self, repo_id: str, revision: str) -> None:
        self.repository(repo_id, to_write=True).resolve(revision)
        self.answer_json(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(self.body)["files"]
                ]
            }
        )

    def batch(self, repo_id: str) -> None:
        self.repository(repo_id, to_write=True)
        answers = []
        for item in json.loads(self.body)["objects"]:
            actions, oid = {}, item["oid"]
            if not (self.server.folder / oid).exists():
                url, header = f"{self.server.url}/objects/{oid}", {}
                parts = -(-item["size"] // self.server.part_bytes)
                if parts > 1:
                    header = {str(part): f"{url}/parts/{part}" for part in range(1, parts + 1)}
                    header["chunk_size"] = str(self.server.part_bytes)
                actions = {"actions": {"upload": {"href": url, "header": header}, "verify": {"href": f"{url}/verify"}}}
            answers.append({**item, **actions})
        self.answer_json({"transfer": "basic", "objects": answers})

    def put(self, oid: str, part: str = "") -> None:
        name = f"{oid}.{part}" if part else oid
        (self.server.folder / name).write_bytes(self.body)
        self.answer(headers={"ETag": hashlib.md5(self.body).hexdigest()})

    def complete(self, oid: str) -> None:
        paths = [self.server.folder / f"{oid}.{part['partNumber']}" for part in json.loads(self.body)["parts"]]
        (self.server.folder / oid).write_bytes(b"".join(path.read_bytes() for path in paths))
        self.answer_json({})

    def verify(self, oid: str) -> None:
        content = (self.server.folder / oid).read_bytes()
        if hashlib.sha256(content).hexdigest() != oid or len(content) != json.loads(self.body)["size"]:
            raise Refused(400, message="not the content that was announced")
        self.answer_json({})

    def commit(self, repo_id: str, branch: str) -> None:
        repository = self.repository(repo_id, to_write=True)
        if not self.server.takes_commits:
            raise Refused(403, message="no commits today")
        files = dict(repository.commits[repository.resolve(branch)])
        message = ""
        for line in self.body.splitlines():
            key, value = (item := json.loads(line))["key"], item["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[value["path"]] = self.server.store(base64.b64decode(value["content"]))
            elif key == "lfsFile":
                if not (self.server.folder / value["oid"]).exists():
                    raise Refused(400, message=f"{value['path']} was not uploaded")
                files[value["path"]] = value["oid"]
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise Refused(400, message=f"this server knows no {key}")
        digest = repository.commit(branch, files, message)
        self.answer_json({"commitOid": digest, "commitUrl": f"{self.server.url}/{repo_id}/commit/{digest}"})

    # Download.

    def download(self, repo_id: str, revision: str, name: str) -> None:
        repository = self.repository(repo_id)
        digest = repository.resolve(revision)
        if name not in repository.commits[digest]:
            self.answer(status=404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": digest})
            return
        oid = repository.commits[digest][name]
        content = (self.server.folder / oid).read_bytes()
        headers = {"ETag": f'"{oid}"', "X-Repo-Commit": digest, "X-Linked-Etag": f'"{oid}"'}
        self.answer(content, headers={**headers, "X-Linked-Size": str(len(content))})


REPO = r"/([^/]+/[^/]+)"
ROUTES = (
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate_card),
    ("GET", f"/api/models{REPO}", Handler.info),
    ("GET", f"/api/models{REPO}/revision/([^/]+)", Handler.info),
    ("GET", f"/api/models{REPO}/tree/([^/]+)", Handler.tree),
    ("GET", f"/api/models{REPO}/tree/([^/]+)/(.+)", Handler.tree),
    ("POST", f"/api/models{REPO}/branch/([^/]+)", Handler.branch),
    ("POST", f"/api/models{REPO}/preupload/([^/]+)", Handler.preupload),
    ("POST", f"/api/models{REPO}/commit/([^/]+)", Handler.commit),
    ("POST", rf"{REPO}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/objects/([^/]+)", Handler.put),
    ("PUT", r"/objects/([^/]+)/parts/(\d+)", Handler.put),
    ("POST", "/objects/([^/]+)", Handler.complete),
    ("POST", "/objects/([^/]+)/verify", Handler.verify),
    ("GET|HEAD", f"{REPO}/resolve/([^/]+)/(.+)", Handler.download),
)
