"""Files of a model's folder that change as one: whenever the process dies, what loads is the old whole or the new.

What is new is put together in a hidden folder inside the target, and is on disk before anything else happens. Then
new shards are moved in under names that are free. What decides is one rename or one deletion:

- Where config.json and the code stay as they are, that of the index or the only file that weights are loaded by. (If
  both are there, Transformers takes the only file.)
- Where they change, a config.json that names, for the time being, the new weights where they are (Transformers'
  `transformers_weights`) and the new code under names of its own (`auto_map`). Under its protection the files get
  their names; the config.json that stays comes last. tokenizer_config.json does the same for a tokenizer.

Old shards are deleted after that. A save that was killed leaves files that nothing loads; the next one removes them.
"""

import errno
import filecmp
import itertools
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


try:
    import fcntl
except ImportError:
    fcntl = None


CONFIG_FILE, TOKENIZER_CONFIG_FILE = "config.json", "tokenizer_config.json"
TOKENIZER_FILE, TOKEN_MAP_FILE = "tokenizer.json", "engram_token_map.safetensors"
# One that Transformers takes for a tokenizer.json of all versions of itself.
TOKENIZER_FILE_MEANWHILE = "tokenizer.0.json"
# Folders in which a save is put together. Locks may be known to one machine only, so the name says which.
STAGED = f".saving-{re.sub('[^A-Za-z0-9.-]', '-', socket.gethostname())}-"
# Whoever moves files in place has a lock on this one, for a moment; others wait so many seconds.
LOCK_FILE, LOCK_SECONDS = ".saving.lock", 60
# What a second name of the weights ends on, which is there to be moved.
TWIN = ".twin"
_OWN_IMPORT = re.compile(r"^(\s*from\s+\.)(\w+)(\s+import\b)", re.MULTILINE)
_lock_holders: dict[Path, int] = {}


def is_staged(folder: str | os.PathLike) -> bool:
    """Whether a folder is one in which a save is put together."""
    return Path(folder).name.startswith(STAGED)


def token_of(folder: Path) -> str:
    """What the names of a save's code end on, as long as they are not those that it is for."""
    return f"_{folder.name.rpartition('-')[2]}"


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk; for the latter, where the system can do so."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_folder or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def second_name(path: Path, name: str) -> None:
    """Gives a file another name beside its own; where there are no hard links, a copy of it."""
    other = path.with_name(name)
    try:
        os.link(path, other)
    except OSError:
        shutil.copyfile(path, other)
        sync(other)


def lock_folder(folder: Path) -> int | None:
    """Locks a folder for as long as the file descriptor that is returned is open, at most as long as this process
    lives. None where that cannot be done.

    Raises:
        BlockingIOError: it is locked by another save.
    """
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


@contextmanager
def sole_commit(target: Path) -> Iterator[None]:
    """Waits until no other process or thread moves files into `target`, and has them wait. Where a file system has no
    locks, there is no waiting.

    Raises:
        TimeoutError: another took too long.
    """
    if fcntl is None:
        yield
        return
    path, key, deadline = target / LOCK_FILE, Path(os.path.realpath(target)), time.monotonic() + LOCK_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if _lock_holders.get(key) == threading.get_ident() or time.monotonic() > deadline:
                raise TimeoutError(
                    f"Another save into {target} is moving its files in place; this one has changed nothing. Save "
                    "again when that one is done."
                ) from None
            time.sleep(0.02)
            continue
        except OSError:
            break
        if _is_same_file(descriptor, path):
            break
        # Whoever had it before has deleted it, and others lock another file of that name.
        os.close(descriptor)
    _lock_holders[key] = threading.get_ident()
    try:
        yield
    finally:
        del _lock_holders[key]
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


class FolderUpdate:
    """New files for a folder, put together in `folder`, inside the target, and then moved in place as one.

    A context manager: commits where its body comes to an end, and leaves the target as it was where that raises.

    Args:
        target: the folder to update; made if missing.
        variant (`str`, *optional*): of the weights, as `save_pretrained` has it.

    Attributes:
        folder (`Path`): where to write.
        checks (`list` of functions without arguments): called before the target is changed, while no other save can
            change it; they raise to refuse.
        saved (`set[str]`): after `commit`, the files of the target that are this save's, changed or not.
        weight_files (`list[str]`): after `commit`, those of them that hold weights.
    """

    def __init__(self, target: str | os.PathLike, variant: str | None = None) -> None:
        self.target = Path(os.path.abspath(target))
        self.variant, self.stem = variant, "model" if variant is None else f"model.{variant}"
        self.single = f"{self.stem}.safetensors"
        self.index = "model.safetensors.index.json" if variant is None else f"model.safetensors.index.{variant}.json"
        self.made_target = not self.target.exists()
        os.makedirs(self.target, exist_ok=True)
        self.folder, self._lock = self._make_folder()
        self.checks: list[Callable[[], None]] = []
        self.saved: set[str] = set()
        self.weight_files: list[str] = []
        self._added: list[Path] = []
        self._is_decided = False

    def _make_folder(self) -> tuple[Path, int | None]:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=STAGED, dir=self.target))
            # Until it is locked, another save may take it for one that was left behind, and remove it.
            try:
                lock = lock_folder(folder)
            except BlockingIOError:
                continue
            if folder.is_dir():
                # For a while, the model may be loaded from here, by whoever may load it from the target.
                shutil.copymode(self.target, folder)
                return folder, lock
            if lock is not None:
                os.close(lock)

    def __enter__(self) -> "FolderUpdate":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self._release()

    def _release(self) -> None:
        """Ends the save. If it was interrupted between the old and the new, the model may be loaded from `folder`,
        which the next save removes."""
        if not self._is_decided:
            for path in self._added:
                path.unlink(missing_ok=True)
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self.made_target:
            try:
                self.target.rmdir()
            except OSError:
                pass

    def commit(self) -> None:
        """Moves everything in place.

        Raises:
            TimeoutError: another save into this folder took too long. OSError: as of the file system.
        """
        with sole_commit(self.target):
            for check in self.checks:
                check()
            self.saved = self._files()
            entry = next((name for name in (self.index, self.single) if name in self.saved), None)
            self.weight_files = [self.single] if entry == self.single else []
            if entry == self.index:
                self._add_shards()
            self._restore_names()
            changed = {name for name in self._files() if name == entry or not self._is_there(name)}
            code = self._add_code(changed)
            redirects = self._redirects(changed, entry, code)
            for path in (*(self.folder / name for name in changed), self.folder, self.target):
                sync(path)

            self._is_decided = True
            if TOKEN_MAP_FILE in changed:
                # Without it, the map is made from the tokenizer, whichever that is, and its digest compared.
                (self.target / TOKEN_MAP_FILE).unlink(missing_ok=True)
            for name, meanwhile in redirects.items():
                os.replace(meanwhile, self.target / name)
            sync(self.target)
            # Weights come under the protection of what stands for the config, or are what decides.
            order = {entry: 0 if CONFIG_FILE in redirects else 5}
            order |= {TOKENIZER_CONFIG_FILE: 2, CONFIG_FILE: 3, TOKEN_MAP_FILE: 4}
            for name in sorted(changed | redirects.keys(), key=lambda name: (order.get(name, 1), name)):
                (self.target / name).parent.mkdir(parents=True, exist_ok=True)
                twin = self.folder / f"{name}{TWIN}"
                os.replace(twin if twin.exists() else self.folder / name, self.target / name)
                if name == entry:
                    (self.target / (self.index if entry == self.single else self.single)).unlink(missing_ok=True)
            sync(self.target)
            self._remove_what_is_left(entry)
            self._is_decided = False
            self._added = []

    def _files(self) -> set[str]:
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}

    def _is_there(self, name: str) -> bool:
        """Whether the target has this file already; then it is not touched."""
        path = self.target / name
        return path.is_file() and filecmp.cmp(path, self.folder / name, shallow=False)

    def _add(self, name: str, new_name: str) -> None:
        """Moves a file into the target, where nothing reads it yet."""
        sync(self.folder / name)
        self._added.append(self.target / new_name)
        os.rename(self.folder / name, self.target / new_name)

    def _add_shards(self) -> None:
        """Adds new shards, under names that are free."""
        path = self.folder / self.index
        index = json.loads(path.read_text(encoding="utf-8"))
        files = sorted(set(index["weight_map"].values()))
        new = [name for name in files if (self.folder / name).exists()]
        for turn in itertools.count():
            stem = f"{self.stem}-{turn}-" if turn else f"{self.stem}-"
            names = {name: name.replace(f"{self.stem}-", stem, 1) if name in new else name for name in files}
            if not any((self.target / names[name]).exists() for name in new):
                break
        index["weight_map"] = {tensor: names[name] for tensor, name in index["weight_map"].items()}
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for name in new:
            self._add(name, names[name])
        self.weight_files = list(names.values())
        self.saved = self.saved - set(new) | set(self.weight_files)

    def _restore_names(self) -> None:
        """Where a killed save has left a config that names its code under the names of meanwhile, and this one brings
        all the code: updates the config, too."""
        code = {name.removesuffix(".py") for name in self.saved if name.endswith(".py")}
        left = [token_of(path) for path in self.target.iterdir() if is_staged(path) and path != self.folder]
        for name in {TOKENIZER_CONFIG_FILE, CONFIG_FILE} - self.saved:
            if not (self.target / name).is_file():
                continue
            text = (self.target / name).read_text(encoding="utf-8")
            for module, token in itertools.product(code, left):
                text = text.replace(f"{module}{token}.", f"{module}.")
            (self.folder / name).write_text(text, encoding="utf-8")

    def _add_code(self, changed: set[str]) -> set[str]:
        """Where code is to be replaced, adds the new one, under names that end on `self.token`; returns its names."""
        code = {name.removesuffix(".py") for name in self.saved if name.endswith(".py")}
        if not any(f"{name}.py" in changed and (self.target / f"{name}.py").exists() for name in code):
            return set()
        for name in code:
            text = (self.folder / f"{name}.py").read_text(encoding="utf-8")
            text = _OWN_IMPORT.sub(lambda m: f"{m[1]}{self._renamed(m[2], code)}{m[3]}", text)
            (self.folder / "meanwhile").write_text(text, encoding="utf-8")
            self._add("meanwhile", f"{name}{self.token}.py")
        return code

    def _renamed(self, reference: Any, code: set[str]) -> Any:
        """A module's name or `module.Class`, or a list or dict of those, by the names that new code has meanwhile."""
        if isinstance(reference, dict):
            return {key: self._renamed(value, code) for key, value in reference.items()}
        if isinstance(reference, list):
            return [self._renamed(value, code) for value in reference]
        module, dot, name = (reference or "").partition(".")
        return f"{module}{self.token}{dot}{name}" if module in code else reference

    def _redirects(self, changed: set[str], entry: str | None, code: set[str]) -> dict[str, Path]:
        """What stands in the place of tokenizer_config.json and config.json until all other files are there."""
        redirects = {}
        for name in (TOKENIZER_CONFIG_FILE, CONFIG_FILE):
            if not (self.target / name).is_file():
                continue
            content = json.loads((self.folder / name).read_text(encoding="utf-8"))
            meanwhile = dict(content)
            if "auto_map" in content:
                meanwhile["auto_map"] = self._renamed(content["auto_map"], code)
            if name == TOKENIZER_CONFIG_FILE and {name, TOKENIZER_FILE} <= changed:
                second_name(self.folder / TOKENIZER_FILE, TOKENIZER_FILE_MEANWHILE)
                meanwhile["fast_tokenizer_files"] = [f"{self.folder.name}/{TOKENIZER_FILE_MEANWHILE}"]
            if name == CONFIG_FILE and entry and self.variant is None and (code or name in changed):
                second_name(self.folder / entry, f"{entry}{TWIN}")
                meanwhile["transformers_weights"] = f"{self.folder.name}/{entry}"
            if meanwhile != content:
                redirects[name] = self.folder / f"{name}.meanwhile"
                redirects[name].write_text(json.dumps(meanwhile, indent=2) + "\n", encoding="utf-8")
                sync(redirects[name])
                sync(self.folder / name)
        return redirects

    def _remove_what_is_left(self, entry: str | None) -> None:
        """Removes what is no part of the checkpoint any more, and what saves left that were killed. That their process
        is dead is known by the lock, which the kernel keeps for the living: without locks, nothing is removed."""
        pattern = re.compile(rf"{re.escape(self.stem)}(-\d+)?-\d{{5}}-of-\d{{5}}\.safetensors")
        for path in list(self.target.iterdir()):
            if entry and pattern.fullmatch(path.name) and path.name not in self.weight_files:
                path.unlink()
        self._remove_code(self.folder)
        read_by = [self.target / name for name in (CONFIG_FILE, TOKENIZER_CONFIG_FILE)]
        texts = [path.read_text(encoding="utf-8") for path in read_by if path.is_file()]
        for folder in [path for path in self.target.iterdir() if is_staged(path)]:
            if any(folder.name in text or token_of(folder) in text for text in texts):
                continue
            try:
                lock = lock_folder(folder)
            except BlockingIOError:
                continue
            if lock is not None:
                self._remove_code(folder)
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)

    def _remove_code(self, folder: Path) -> None:
        for path in self.target.glob(f"*{token_of(folder)}.py"):
            if path.name not in self.saved:
                path.unlink()

    @property
    def token(self) -> str:
        return token_of(self.folder)
