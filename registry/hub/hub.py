"""Push to and pull from a Hugging Face Hub: one atomic commit plus a tag, and downloads of one
resolved commit.

A repository holds one translator at its root and what is bound to it in `<kind>/<tag>/`. Where its
card says more than the asset's own, which is part of the asset, that one lies in `asset/`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    snapshot_download,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kvbridge.errors import CorruptFile, NotInStore, Refused, TransferFailed
from kvbridge.format import CARD, SUMS, TRANSLATOR
from kvbridge.geometry import digest_json
from kvbridge.registry.store.admission import Progress
from kvbridge.registry.store.disk import disk_errors, remove_tree
from kvbridge.registry.store.refs import Ref, check_tag
from kvbridge.registry.store.store import LocalStore

HTTP_ERROR: Any = HfHubHTTPError.__bases__[
    0
]  # that of the HTTP package in use: its name differs between releases
MAX_FILES = 10_000
OWN_CARD = f"asset/{CARD}"
_ROOT = frozenset({*TRANSLATOR.required, SUMS})
_BOUND = re.compile(
    r"(controls|calibration|signature)/([A-Za-z0-9][A-Za-z0-9._-]{0,63})/([A-Za-z0-9._-]{1,99})"
)


@dataclass(frozen=True)
class Pushed:
    """Where an asset went: repository, the commit, and the tag that stands for it."""

    repo: str
    commit: str
    tag: str


class Hub:
    """One endpoint. `endpoint` None is the usual one; `token` None is the one that is logged in."""

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        self.endpoint, self.token = endpoint, token
        self._api = HfApi(endpoint=endpoint, token=token, library_name="kvbridge")

    def push(
        self,
        store: LocalStore,
        digest: str,
        repo: str,
        *,
        tag: str | None = None,
        private: bool | None = None,
        section: str | None = None,
    ) -> Pushed:
        """Uploads a translator and everything bound to it in one commit, then tags it (by default
        with its content).

        Objects are verified first. `section` is added to the repository's card, the asset stays as
        it is. A tag that stands for another commit is never moved, and a commit that came between
        is not overwritten: both raise TransferFailed.
        """
        if store.verify(digest).kind != "translator":
            raise NotInStore(f"{digest}: expected a translator; what is bound to it goes with it")
        wanted = {path.name: path for path in store.path(digest).iterdir()}
        for ref in store.bound(digest):
            store.verify(ref.digest)
            wanted |= {
                f"{ref.kind}/{ref.tag}/{path.name}": path
                for path in store.path(ref.digest).iterdir()
            }
        content = digest_json(
            {name: path.parent.name for name, path in wanted.items()} | {"": section or ""}
        )
        uploads: dict[str, str | bytes] = {name: str(path) for name, path in wanted.items()}
        if section is not None:
            uploads[OWN_CARD] = uploads[CARD]
            uploads[CARD] = wanted[CARD].read_bytes() + f"\n{section}".encode()
        own = tag is None
        tag = check_tag(tag or f"kvbridge-{digest[:12]}-{content[:12]}")
        with _hub_errors(f"pushing to {repo}"):
            self._api.create_repo(repo, private=private, exist_ok=True)
            head = self._api.model_info(repo)
            there = self._tagged(repo, tag)
            if there not in (None, head.sha) and not own:
                raise TransferFailed(
                    f"{repo}: tag {tag!r} stands for commit {there} already; choose another"
                )
            names = {s.rfilename for s in head.siblings or ()}
            stale = sorted(name for name in names - set(uploads) if _ours(name))
            commit = self._api.create_commit(
                repo,
                [
                    *(CommitOperationAdd(name, uploads[name]) for name in sorted(uploads)),
                    *(CommitOperationDelete(name) for name in stale),
                ],
                commit_message=f"Publish translator {digest[:12]}",
                parent_commit=head.sha,
            )
            if there is None:
                self._api.create_tag(repo, tag=tag, revision=commit.oid)
            elif there != commit.oid and not own:
                raise TransferFailed(
                    f"{repo}: tag {tag!r} stands for commit {there}, this is {commit.oid}; choose another"
                )
        return Pushed(repo, commit.oid, tag)

    def _tagged(self, repo: str, tag: str) -> str | None:
        try:
            return self._api.model_info(repo, revision=tag).sha
        except RevisionNotFoundError:
            return None

    def resolve(self, repo: str, revision: str | None = None) -> tuple[str, dict[str, int]]:
        """The commit that a revision stands for now, and name → size of what a pull of it would
        fetch."""
        with _hub_errors(f"looking up {repo}"):
            info = self._api.model_info(repo, revision=revision, files_metadata=True)
        siblings = info.siblings or []
        if len(siblings) > MAX_FILES or not info.sha:
            raise Refused(
                f"{repo}: {len(siblings)} files; expected a repository that kvbridge pushed"
            )
        sizes = {s.rfilename: s.size or 0 for s in siblings if _ours(s.rfilename)}
        if missing := _ROOT - set(sizes):
            raise Refused(
                f"{repo}: {', '.join(sorted(missing))} is missing; expected a repository that kvbridge pushed"
            )
        return info.sha, sizes

    def pull(
        self,
        store: LocalStore,
        repo: str,
        *,
        revision: str | None = None,
        tag: str = "main",
        expect: str | None = None,
        progress: Progress = lambda done, total: None,
    ) -> Ref:
        """Downloads one resolved commit and publishes it under `tag`, with everything bound to it.

        `expect` is the digest it must have. A pull that was interrupted goes on where it was.
        Nothing that was fetched enters the store before it was admitted.
        """
        check_tag(tag)
        commit, sizes = self.resolve(repo, revision)
        if sum(sizes.values()) > 2 * store.policy.max_weights_bytes:
            raise Refused(
                f"{repo}: {sum(sizes.values()):,} bytes, more than this store's policy allows"
            )
        with disk_errors(f"pulling {repo}"), _downloads(store.home / "downloads", repo) as cache:
            with _hub_errors(f"pulling {repo}"):
                folder = snapshot_download(
                    repo,
                    revision=commit,
                    allow_patterns=sorted(sizes),
                    cache_dir=cache,
                    endpoint=self.endpoint,
                    token=self.token,
                    library_name="kvbridge",
                )
            with _vanished(repo):
                groups = _groups(Path(folder).resolve(), sizes, cache.resolve())
                root = groups.pop(("translator", ""))
                signature = next(
                    (files for (kind, _), files in groups.items() if kind == "signature"), None
                )
                if expect is not None:
                    _expected(root, expect, repo)
                ref = store.publish(
                    root, tag=tag, signature=signature, origin=f"{repo}@{commit}", progress=progress
                )
                for (kind, bound_tag), files in groups.items():
                    if kind != "signature" or store.policy.require_signature is False:
                        store.attach(files, tag=bound_tag)
        return ref


def _groups(
    folder: Path, names: Mapping[str, int], within: Path
) -> dict[tuple[str, str], dict[str, Path]]:
    """(kind, tag) → file name → where the downloaded bytes are; what was not downloaded into
    `within` is refused."""
    groups: dict[tuple[str, str], dict[str, Path]] = {}
    for name in sorted(
        names
    ):  # the asset's own card comes after the repository's and takes its place
        match = _BOUND.fullmatch(name)
        key, file = (
            (("translator", ""), name) if match is None else ((match[1], match[2]), match[3])
        )
        file = CARD if name == OWN_CARD else file
        path = (folder / name).resolve()
        if not path.is_relative_to(within):
            raise Refused(f"{name}: was downloaded to {path}, outside {within}")
        groups.setdefault(key, {})[file] = path
    return groups


def _ours(name: str) -> bool:
    """Whether a push writes and a pull fetches a file of that name."""
    return name in _ROOT or name == OWN_CARD or _BOUND.fullmatch(name) is not None


def _expected(files: Mapping[str, Path], expect: str, repo: str) -> None:
    found = hashlib.sha256(files[SUMS].read_bytes()).hexdigest()
    if found != expect:
        raise Refused(
            f"{repo}: its asset has digest {found}, expected {expect}; pull the revision that has it"
        )


@contextlib.contextmanager
def _downloads(folder: Path, repo: str) -> Iterator[Path]:
    """Where a repository's downloads go; kept after a failure (the next pull goes on), removed
    after success.

    The lock only keeps one pull from removing what another is still reading.
    """
    cache = folder / re.sub(r"[^A-Za-z0-9._-]", "--", repo)[:200]
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / f"{cache.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        cache.mkdir(exist_ok=True)
        yield cache
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_tree(cache)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _vanished(repo: str) -> Iterator[None]:
    """Where locks do nothing, another pull of the repository may end and remove what this one has
    downloaded."""
    try:
        yield
    except CorruptFile as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise TransferFailed(
                f"pulling {repo}: another pull of it removed the downloads; pull again"
            ) from error
        raise


@contextlib.contextmanager
def _hub_errors(action: str) -> Iterator[None]:
    """Turns what the Hub's client raises into TransferFailed with the next step."""
    if constants.HF_HUB_OFFLINE:
        raise TransferFailed(
            f"{action}: offline mode is on; unset HF_HUB_OFFLINE, or `kvbridge registry add` a folder"
        )
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise TransferFailed(f"{action}: offline mode is on; unset HF_HUB_OFFLINE") from error
    except (RevisionNotFoundError, RepositoryNotFoundError) as error:
        raise TransferFailed(
            f"{action}: no such repository or revision, or not for this token"
        ) from error
    except HTTP_ERROR as error:
        raise TransferFailed(
            f"{action}: {_one_line(error)}; check the address and the token, then try again"
        ) from error
    except (ConnectionError, FileNotFoundError, ValueError) as error:
        raise TransferFailed(f"{action}: {_one_line(error)}; try again") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
