"""A Hugging Face checkpoint directory: names, headers and values, matched against the manifest.

Opening reads headers only. Values are views of memory-mapped files; `release` drops the pages that
were touched, so that a checkpoint larger than memory can be read from end to end.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from .. import weights
from ..errors import CheckpointError
from .files import Listing, Stored, Views, few, list_directory

PREFIXES = ("language_model.", "model.language_model.", "")
_SKIPPED = ("vision_tower", "multi_modal_projector", "patch_merge_mlp", "mtp", "dspark")
_UNIT_SCALES = ("k_scale", "v_scale")


class CheckpointWarning(UserWarning):
    """Something in a checkpoint that is odd and harmless."""


def detect_prefix(names: Iterable[str], prefixes: Sequence[str] = PREFIXES) -> str:
    """The prefix that most names carry."""
    votes = dict.fromkeys(prefixes, 0)
    for name in names:
        for prefix in prefixes:
            if name.startswith(prefix):
                votes[prefix] += 1
                break
    return max(prefixes, key=lambda prefix: votes[prefix])


def canonical(name: str, prefix: str) -> str | None:
    """A stored name as the manifest spells it; None if it does not carry the prefix.

    Re-saves with `model.language_model.` may drop the inner `model.` and leave lm_head outside.
    """
    if prefix == "model.language_model." and name.startswith("lm_head."):
        return name
    if not name.startswith(prefix):
        return None
    rest = name.removeprefix(prefix)
    if prefix == "model.language_model." and not rest.startswith(("model.", "lm_head.")):
        return "model." + rest
    return rest


def _is_skipped(name: str) -> bool:
    """Vision, multi-token prediction and drafter tensors, and rotary tables (recomputed)."""
    return any(part in _SKIPPED for part in name.split(".")) or name.endswith("rotary_emb.inv_freq")


class Checkpoint(Views):
    """An opened directory.

    Attributes:
      directory, listing: where it lies and what its files hold.
      prefix: what text tensors' names begin with.
      tensors: text tensors by canonical name.
      skipped: stored names that are known and not loaded.
      unit_scales: stored K/V cache scales; not loaded, and must equal 1.
      foreign: stored names without the prefix that nothing knows.
    """

    def __init__(self, directory: Path):
        """Read the headers of a directory.

        Raises:
          CheckpointError: it is no directory. Problems of its files are in `listing.problems`.
        """
        super().__init__()
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory} is not a directory; pass one that holds config.json"
            )
        self.directory = directory
        self.listing: Listing = list_directory(directory)
        stored = self.listing.tensors
        self.prefix = detect_prefix(name for name in stored if not _is_skipped(name))
        self.tensors: dict[str, Stored] = {}
        self.skipped: list[str] = []
        self.unit_scales: list[Stored] = []
        self.foreign: list[str] = []
        for name, tensor in stored.items():
            plain = canonical(name, self.prefix)
            if _is_skipped(name):
                self.skipped.append(name)
            elif name.rsplit(".", 1)[-1] in _UNIT_SCALES:
                self.unit_scales.append(tensor)
            elif plain is None or plain in self.tensors:
                self.foreign.append(name)
            else:
                self.tensors[plain] = tensor

    def find(self, source: weights.Source) -> Stored | None:
        """The stored tensor of a source under any of its spellings."""
        for name in (source.name, *source.aliases):
            if name in self.tensors:
                return self.tensors[name]
        return None

    def fits(self, source: weights.Source) -> bool:
        """Whether a source is there in an accepted shape and dtype."""
        stored = self.find(source)
        return (
            stored is not None
            and stored.shape in source.shapes
            and stored.dtype in source.part.dtypes
        )

    def untouched(self) -> dict[str, Stored]:
        """Tensors that are known and not loaded, by stored name: vision, K/V scales."""
        names = [*self.skipped, *(stored.name for stored in self.unit_scales)]
        return {name: self.listing.tensors[name] for name in names}

    def problems(self, manifest: weights.Manifest) -> list[str]:
        """Everything that headers alone show to be wrong, against the model's manifest."""
        found = list(self.listing.problems)
        if not self.listing.tensors:
            return found
        found += self._names(manifest)
        shapes, dtypes = [], []
        for source in (*manifest.sources(), *manifest.optional):
            stored = self.find(source)
            if stored is None:
                continue
            where = f"{stored.name} ({stored.path.name})"
            if stored.shape not in source.shapes:
                shapes.append(f"{where} is {list(stored.shape)}, expected {list(source.shape)}")
            if stored.dtype not in source.part.dtypes:
                dtypes.append(
                    f"{where} is {stored.dtype}, expected {' or '.join(source.part.dtypes)}"
                )
        if shapes:
            found.append(f"wrong shape: {few(shapes)}; the files do not belong to this config.json")
        if dtypes:
            found.append(f"wrong dtype: {few(dtypes)}; see quantization_config in config.json")
        return found

    def _names(self, manifest: weights.Manifest) -> list[str]:
        """Missing, unexpected and doubly spelled tensors, and sets that are there in part."""
        present: dict[str, list[str]] = {}
        absent: dict[str, list[str]] = {}
        twice = []
        expected: set[str] = set()
        for source in manifest.sources():
            spellings = [n for n in (source.name, *source.aliases) if n in self.tensors]
            side = present if spellings else absent
            side.setdefault(source.set, []).append(source.name)
            expected.update((source.name, *source.aliases))
            if len(spellings) > 1:
                twice.append(" and ".join(self.tensors[n].name for n in spellings))
        expected.update(source.name for source in manifest.optional)
        shards = ", ".join(path.name for path in self.listing.shards[:3])
        count = len(self.listing.shards)
        where = f"in {self.directory} ({count} file(s): {shards}; prefix {self.prefix!r})"
        found = []
        partial = [
            f"{self.prefix}{name} (present: {self.prefix}{present[group][0]})"
            for group, names in absent.items()
            for name in names
            if group in present
        ]
        missing = [
            self.prefix + name
            for group, names in absent.items()
            for name in names
            if group not in present
        ]
        unexpected = [
            f"{stored.name} ({stored.path.name})"
            for name, stored in self.tensors.items()
            if name not in expected and name != "lm_head.weight"
        ]
        unexpected += [f"{n} ({self.listing.tensors[n].path.name})" for n in self.foreign]
        head = self.tensors.get("lm_head.weight")
        if head is not None and "lm_head.weight" not in expected and not self._is_tied(head):
            unexpected.append(
                f"{head.name} ({head.path.name}; config.json ties the head to the embedding, and "
                "the two differ)"
            )
        if partial and self.listing.is_whole:
            found.append(f"incomplete sets of tensors {where}: {few(partial)}")
        if missing and self.listing.is_whole:
            found.append(f"missing tensors {where}: {few(missing)}")
        if unexpected:
            found.append(f"unexpected tensors {where}: {few(unexpected)}")
        if twice:
            found.append(f"one tensor under two names {where}: {few(twice)}")
        return found

    def _is_tied(self, head: Stored) -> bool:
        """Whether a stored head repeats the embedding, as some writers leave it."""
        embedding = self.tensors.get("model.embed_tokens.weight")
        if embedding is None or (embedding.shape, embedding.dtype) != (head.shape, head.dtype):
            return False
        one, other = self.view(embedding), self.view(head)
        rows = max(1, (64 << 20) // max(1, one[0].nbytes))
        same = True
        for start in range(0, one.shape[0], rows):
            cut = slice(start, start + rows)
            same = same and one[cut].tobytes() == other[cut].tobytes()
            self.release()
        return same


def raise_problems(directory: Path, problems: list[str]) -> None:
    """Raise what is wrong, if anything.

    Raises:
      CheckpointError: one problem as it is, several as a list.
    """
    if not problems:
        return
    if len(problems) == 1:
        raise CheckpointError(problems[0])
    lines = "".join(f"\n  {problem}" for problem in problems[:20])
    raise CheckpointError(f"{directory} has {len(problems)} problems:{lines}")
