"""Push to and pull from a Hugging Face Hub: one atomic commit plus a tag, and downloads of one
resolved commit.

A repository holds one translator at its root and what is bound to it in `<kind>/<tag>/`. Where its
card says more than the asset's own, which is part of the asset, that one lies in `asset/`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    snapshot_download,
)
from huggingface_hub.errors import (
    RevisionNotFoundError,
)

from kvbridge.errors import NotInStore, Refused, TransferFailed
from kvbridge.format import CARD, SUMS, TRANSLATOR
from kvbridge.geometry import digest_json
from kvbridge.registry.hub.bars import reporting
from kvbridge.registry.hub.transfer import downloads, hub_errors, vanished
from kvbridge.registry.store import LocalStore
from kvbridge.registry.store.admission import ByteProgress
from kvbridge.registry.store.disk import disk_errors
from kvbridge.registry.store.refs import Ref, check_tag

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
        paths = _pushed_files(store, digest)
        uploads: dict[str, str | bytes] = {name: str(path) for name, path in paths.items()}
        if section is not None:
            uploads[OWN_CARD] = uploads[CARD]
            uploads[CARD] = paths[CARD].read_bytes() + f"\n{section}".encode()
        named_by_content = tag is None
        tag = check_tag(tag or _content_tag(digest, paths, section))
        with hub_errors(f"pushing to {repo}"):
            self._api.create_repo(repo, private=private, exist_ok=True)
            head = self._api.model_info(repo)
            tagged = self._tagged(repo, tag)
            if tagged not in (None, head.sha) and not named_by_content:
                raise TransferFailed(
                    f"{repo}: tag {tag!r} stands for commit {tagged} already; choose another"
                )
            present = {s.rfilename for s in head.siblings or ()}
            stale = sorted(name for name in present - set(uploads) if _transferred(name))
            operations: list[CommitOperationAdd | CommitOperationDelete] = []
            operations += [CommitOperationAdd(name, uploads[name]) for name in sorted(uploads)]
            operations += [CommitOperationDelete(name) for name in stale]
            commit = self._api.create_commit(
                repo,
                operations,
                commit_message=f"Publish translator {digest[:12]}",
                parent_commit=head.sha,
            )
            if tagged is None:
                self._api.create_tag(repo, tag=tag, revision=commit.oid)
            elif tagged != commit.oid and not named_by_content:
                raise TransferFailed(
                    f"{repo}: tag {tag!r} stands for commit {tagged}, this is {commit.oid}; "
                    "choose another"
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
        with hub_errors(f"looking up {repo}"):
            info = self._api.model_info(repo, revision=revision, files_metadata=True)
        siblings = info.siblings or []
        if len(siblings) > MAX_FILES or not info.sha:
            raise Refused(
                f"{repo}: {len(siblings)} files; expected a repository that kvbridge pushed"
            )
        sizes = {s.rfilename: s.size or 0 for s in siblings if _transferred(s.rfilename)}
        if missing := _ROOT - set(sizes):
            raise Refused(
                f"{repo}: {', '.join(sorted(missing))} is missing; "
                "expected a repository that kvbridge pushed"
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
        fetching: ByteProgress = lambda done, total: None,
        progress: ByteProgress = lambda done, total: None,
    ) -> Ref:
        """Downloads one resolved commit and publishes it under `tag`, with everything bound to it.

        `expect` is the digest it must have. A pull that was interrupted goes on where it was.
        Nothing that was fetched enters the store before it was admitted. `fetching` is told the
        bytes that are downloaded, `progress` those that are admitted.
        """
        check_tag(tag)
        commit, sizes = self.resolve(repo, revision)
        size_bytes = sum(sizes.values())
        if size_bytes > 2 * store.policy.max_weights_bytes:
            raise Refused(f"{repo}: {size_bytes:,} bytes, more than this store's policy allows")
        with disk_errors(f"pulling {repo}"), downloads(store.home / "downloads", repo) as cache:
            with hub_errors(f"pulling {repo}"):
                folder = snapshot_download(
                    repo,
                    revision=commit,
                    allow_patterns=sorted(sizes),
                    cache_dir=cache,
                    endpoint=self.endpoint,
                    token=self.token,
                    library_name="kvbridge",
                    tqdm_class=reporting(fetching),
                )
            with vanished(repo):
                groups = _groups(Path(folder).resolve(), sizes, cache.resolve())
                root = groups.pop(("translator", ""))
                signatures = [files for (kind, _), files in groups.items() if kind == "signature"]
                if expect is not None:
                    _expected(root, expect, repo)
                ref = store.publish(
                    root,
                    tag=tag,
                    signature=signatures[0] if signatures else None,
                    origin=f"{repo}@{commit}",
                    progress=progress,
                )
                for (kind, bound_tag), files in groups.items():
                    # Where signatures are asked for, publishing has attached the one it checked.
                    if kind != "signature" or store.policy.require_signature is False:
                        store.attach(files, tag=bound_tag)
        return ref


def _pushed_files(store: LocalStore, digest: str) -> dict[str, Path]:
    """Name in the repository → path in the store, of a translator and of everything bound to it.

    Raises CorruptFile where something that is bound fails its digest.
    """
    paths = {path.name: path for path in store.path(digest).iterdir()}
    for ref in store.bound(digest):
        store.verify(ref.digest)
        for path in store.path(ref.digest).iterdir():
            paths[f"{ref.kind}/{ref.tag}/{path.name}"] = path
    return paths


def _content_tag(digest: str, paths: Mapping[str, Path], section: str | None) -> str:
    """A tag that names what is pushed: the same content has the same tag, other content another."""
    objects = {name: path.parent.name for name, path in paths.items()}
    content = digest_json({**objects, "": section or ""})
    return f"kvbridge-{digest[:12]}-{content[:12]}"


def _groups(
    folder: Path, names: Mapping[str, int], within: Path
) -> dict[tuple[str, str], dict[str, Path]]:
    """(kind, tag) → file name → where the downloaded bytes are; what was not downloaded into
    `within` is refused."""
    groups: dict[tuple[str, str], dict[str, Path]] = {}
    # Sorted, so that the asset's own card comes after the repository's and takes its place.
    for name in sorted(names):
        key, file = ("translator", ""), name
        if (match := _BOUND.fullmatch(name)) is not None:
            key, file = (match[1], match[2]), match[3]
        elif name == OWN_CARD:
            file = CARD
        path = (folder / name).resolve()
        if not path.is_relative_to(within):
            raise Refused(f"{name}: was downloaded to {path}, outside {within}")
        groups.setdefault(key, {})[file] = path
    return groups


def _transferred(name: str) -> bool:
    """Whether a push writes and a pull fetches a file of that name."""
    return name in _ROOT or name == OWN_CARD or _BOUND.fullmatch(name) is not None


def _expected(files: Mapping[str, Path], expect: str, repo: str) -> None:
    """Raises Refused where the asset's digest, which is that of its sums, is not `expect`."""
    digest = hashlib.sha256(files[SUMS].read_bytes()).hexdigest()
    if digest != expect:
        raise Refused(
            f"{repo}: its asset has digest {digest}, expected {expect}; "
            "pull the revision that has it"
        )
