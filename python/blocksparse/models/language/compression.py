"""Files made small by a language model: what it expects costs few bits.

The text is cut into streams that the model reads side by side, a byte of each at a step. Its probabilities of what
comes next drive one range coder, stream after stream. Decompression takes the same steps, with the same sizes, so that
the same build on the same machine gets the same bits from every product, and knows each byte when it is its turn.

A text of which the model knows nothing is stored as it is.
"""

from __future__ import annotations

import hashlib
import json
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...torch.recurrent import State
from .network import LanguageModel
from .stepping import Stepper

MAGIC = b"BSL\x02"
MODEL_BYTES, CHECK_BYTES = 8, 4  # of digests: a header has 30 bytes, a thousandth of what 130 kB of English become
MOST_STREAMS = 1 << 16
MOST_THREADS = 4096
WORD = 4  # bytes, in which the coder writes
LIKELIEST = 50_000  # bytes in a bit at best: the coder's probabilities leave 2^-24 for each other byte

Progress = Callable[[int], None]  # is told how many bytes are done


class CompressionError(ValueError):
    """A file that cannot be decompressed; the message says why."""


@dataclass(frozen=True)
class Header:
    """What decompression needs to know.

    Args:
        length: of the text, in bytes.
        streams: side by side; 0 where the text is stored.
        threads: of PyTorch, on whose number its sums depend.
        bf16: products in bfloat16.
        model: `digest_of` the model.
        text: a digest of it.
        made_by: a digest of `environment`.
    """

    length: int
    streams: int
    threads: int
    bf16: bool
    model: bytes
    text: bytes
    made_by: bytes

    @property
    def stored(self) -> bool:
        """Whether the payload is the text itself."""
        return self.streams == 0

    def pack(self, payload: bytes) -> bytes:
        """The whole file."""
        numbers = (self.length, self.streams, 2 * self.threads + self.bf16)
        rest = self.model + self.text + self.made_by + b"".join(map(_packed, numbers)) + payload
        return MAGIC + zlib.crc32(rest).to_bytes(4, "little") + rest

    @classmethod
    def unpack(cls, data: bytes) -> tuple[Header, bytes]:
        """(header, payload) of a whole file.

        Raises:
            CompressionError: it is none of ours, cut or altered.
        """
        if len(data) < len(MAGIC) or not data.startswith(MAGIC):
            raise CompressionError("[lm] this is no file that `lm compress` has made")
        begin = len(MAGIC) + 4
        if len(data) < begin or zlib.crc32(data[begin:]) != int.from_bytes(data[len(MAGIC) : begin], "little"):
            raise CompressionError(f"[lm] the compressed file is cut or altered: its {len(data)} bytes fail the check")
        digests = []
        for size in (MODEL_BYTES, CHECK_BYTES, CHECK_BYTES):
            digests.append(data[begin : begin + size])
            begin += size
        numbers = []
        for _ in range(3):
            number, begin = _unpacked(data, begin)
            numbers.append(number)
        length, streams, threads = numbers
        header = cls(length, streams, threads // 2, threads % 2 == 1, *digests)
        payload = data[begin:]
        if header.stored:
            possible = header.length == len(payload) and header.text == _check_of(payload)
        else:
            most = min(MOST_STREAMS, max(1, header.length))
            possible = header.streams <= most and header.length <= (len(payload) + 8) * 8 * LIKELIEST
        if not possible or not 1 <= header.threads <= MOST_THREADS:
            raise CompressionError(f"[lm] the compressed file describes what cannot be: {header}")
        return header, payload


def _packed(number: int) -> bytes:
    """Seven bits a byte, the lowest first; 128 says that more follow."""
    made = bytearray()
    while number >= 128:
        made.append(number % 128 + 128)
        number //= 128
    return bytes([*made, number])


def _unpacked(data: bytes, at: int) -> tuple[int, int]:
    """The number there, and where it ends; behind the end of the data there are zeros."""
    number = 0
    for i, byte in enumerate(data[at : at + 10]):
        number += byte % 128 << 7 * i
        if byte < 128:
            return number, at + i + 1
    return number, min(len(data), at + 10)


def streams_of(length: int, asked: int | None = None) -> int:
    """How many streams `compress` cuts so many bytes into, where so many are asked for; None is its default.

    Raises:
        ValueError: what is asked for is out of range.
    """
    if asked is None:
        asked = min(64, length // 8192) or 1
    if asked < 1 or asked > MOST_STREAMS:
        raise ValueError(f"[lm] streams is {asked}, needs 1 to {MOST_STREAMS}")
    return max(1, min(asked, length))


def compress(
    model: LanguageModel,
    text: bytes,
    *,
    streams: int | None = None,
    bf16: bool = False,
    progress: Progress = lambda done: None,
) -> bytes:
    """A file from which `decompress` with the same model makes the text again, at most 40 bytes longer than that.

    Args:
        model: predicts the text; the smaller its bits per byte, the smaller the file.
        text: any bytes.
        streams: parts that are read side by side: more are faster, but each begins without context and costs a
            byte. By default one for 8 kB, 64 at most.
        bf16: products in bfloat16, by autocast.
        progress: is told from time to time how many bytes are done.

    Raises:
        ValueError: streams is out of range, or the model gives no probabilities.
        ModuleNotFoundError: constriction, the range coder, is not installed.
    """
    stream, family = _coder()
    if torch.get_num_threads() > MOST_THREADS:
        raise ValueError(f"[lm] PyTorch has {torch.get_num_threads()} threads, needs 1 to {MOST_THREADS}")
    header = Header(
        len(text),
        streams_of(len(text), streams),
        torch.get_num_threads(),
        bf16,
        digest_of(model),
        _check_of(text),
        _check_of(environment(model).encode()),
    )
    data = np.frombuffer(text, np.uint8)
    coder = stream.queue.RangeEncoder()
    steps = _Steps(model, header)
    for t, places in enumerate(_places(header)):
        symbols = data[places]
        coder.encode(symbols.astype(np.int32), family, steps.probabilities()[: symbols.size])
        steps.read(symbols)
        if t % 16 == 0:
            progress(min(header.length, t * header.streams))
    progress(header.length)
    coded = coder.get_compressed().astype("<u4").tobytes()
    if len(coded) <= len(text) + WORD:
        return header.pack(coded)
    return replace(header, streams=0).pack(text)


def decompress(model: LanguageModel, data: bytes, *, progress: Progress = lambda done: None) -> bytes:
    """The text of a file that `compress` has made.

    Raises:
        CompressionError: the file is none, cut or altered, of another model, or what comes out is not what went in, as
            can be on another machine.
        ModuleNotFoundError: constriction, the range coder, is not installed.
    """
    header, payload = Header.unpack(data)
    if header.stored:
        progress(header.length)
        return payload
    mine, here = digest_of(model), environment(model)
    if header.model != mine:
        raise CompressionError(
            f"[lm] the file was compressed by another model: {header.model.hex()}, this one is {mine.hex()}"
        )
    if header.made_by != _check_of(here.encode()):
        warnings.warn(
            f"the file was made by other versions or on another machine than here ({here}), "
            "where it may come out wrong (that is noticed)",
            stacklevel=2,
        )
    stream, family = _coder()
    if len(payload) % WORD != 0:
        raise CompressionError(
            f"[lm] the compressed file has a payload of {len(payload)} bytes, needs a multiple of {WORD}"
        )
    coder = stream.queue.RangeDecoder(np.frombuffer(payload, "<u4").astype(np.uint32))
    try:
        text = np.zeros(header.length, np.uint8)
    except MemoryError as error:
        raise CompressionError(f"[lm] the file describes {header.length} bytes of text, more than fits here") from error
    try:
        with _threads(header.threads):
            steps = _Steps(model, header)
            for t, places in enumerate(_places(header)):
                symbols = coder.decode(family, steps.probabilities()[: places.size]).astype(np.uint8)
                text[places] = symbols
                steps.read(symbols)
                if t % 16 == 0:
                    progress(min(header.length, t * header.streams))
    except AssertionError as error:  # the coder's, when it meets what no encoder writes
        raise _came_out_wrong(here) from error
    progress(header.length)
    made = text.tobytes()
    if _check_of(made) != header.text:
        raise _came_out_wrong(here)
    return made


def _came_out_wrong(here: str) -> CompressionError:
    return CompressionError(
        "[lm] what comes out is not what went in: the model computes other bits here than where the file was made "
        f"(here is {here})"
    )


def _check_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:CHECK_BYTES]


def _places(header: Header) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    """Where the bytes of each step are in the text; the first streams may have one more than the others."""
    size, longer = divmod(header.length, header.streams)
    i = np.arange(header.streams)
    first = i * size + np.minimum(i, longer)
    for t in range(size):
        yield first + t
    if longer > 0:
        yield (first + size)[:longer]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """PyTorch with so many threads, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Steps:
    """The model at every stream's next byte."""

    def __init__(self, model: LanguageModel, header: Header) -> None:
        self.step = Stepper(model, header.bf16)
        self.state: State | None = None
        self.last: Tensor | None = None  # byte of each stream
        self.streams = header.streams

    @torch.inference_mode()
    def probabilities(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Of all bytes, [streams, 256]. Always of all streams: other sizes could give other bits.

        The first byte of a stream costs 8 bits: nothing is known yet, and models are not trained to begin.
        """
        if self.last is None:
            return np.full((self.streams, 256), 1 / 256, np.float32)
        logits, self.state = self.step(self.last.to(self.step.device), self.state)
        chances: Tensor = logits[0].float().softmax(1).cpu()
        if not bool(chances.isfinite().all()):
            raise ValueError("[lm] the model gives no probabilities, but NaN: its training has failed")
        return chances.numpy()

    def read(self, symbols: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """What the bytes are."""
        if self.last is None:
            self.last = torch.zeros(1, self.streams, dtype=torch.int64)
        self.last[0, : symbols.size] = torch.from_numpy(symbols.astype(np.int64))


def digest_of(model: LanguageModel) -> bytes:
    """A few bytes that tell models apart: of the configuration and of all weights."""
    sha = hashlib.sha256(json.dumps(asdict(model.config), sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.digest()[:MODEL_BYTES]


def environment(model: LanguageModel) -> str:
    """All on which the bits of a product may depend, but for the processor's model."""
    from ... import __version__, cpu_isa

    device = model.output.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_isa()
    return f"blocksparse {__version__}, PyTorch {torch.__version__}, constriction {_version()}, {where}"


def _coder() -> tuple[Any, Any]:
    """(constriction.stream, the family of distributions)."""
    stream = _constriction().stream
    return stream, stream.model.Categorical(perfect=False)


def _version() -> str:
    from importlib.metadata import version

    _constriction()
    return version("constriction")


def _constriction() -> ModuleType:
    try:
        import constriction
    except ModuleNotFoundError:
        raise ModuleNotFoundError("compression needs constriction: pip install 'blocksparse[lm]'") from None
    module: ModuleType = constriction
    return module
