"""The simulated engine's KV cache: a pool of blocks with reference counts and a prefix cache."""

from collections import OrderedDict
from collections.abc import Iterable

from pdserve.contract.prefixes import NAME_BYTES, CachedPrefixes, PromptImage, block_names, image_keys


class BlockPool:
    """Blocks that no request holds keep their content until they are needed again, least recently freed first.

    The content of a full block is a number made of the name of its prefix and the engine's weights: equal contents
    mean equal KV."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.weights = 0
        """Number of the loaded weights, XORed into each block's content, so that other weights give other contents."""
        self.prefixes = CachedPrefixes()
        self.prefixes.resize(blocks, block_size)
        self.total = blocks
        self._refs: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._content: dict[int, int] = {}
        self._cached: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def whole(self, prompt: list[int], parent: bytes = b"", images: Iterable[PromptImage] = ()) -> list[int]:
        """The contents of the prompt's full blocks once they are computed. `parent`: the name of its salt and adapter
        (`prefixes.root_name`)."""
        prefixes = block_names(prompt, self.block_size, parent, shown=image_keys(images, self.block_size))
        return [int.from_bytes(name) ^ self.weights for name in prefixes]

    def take(self, prompt: int, whole: list[int], tokens: int) -> tuple[list[int], int] | None:
        """Take blocks for `tokens` tokens. Return them, and the number of first blocks that hold the prompt's cached
        prefix; None if too few blocks are free. `prompt`: tokens of the prompt; `whole`: contents of its full blocks.
        As in vLLM, the last token never counts as cached."""
        hit: list[int] = []
        for content in whole[: (prompt - 1) // self.block_size]:
            if content not in self._cached:
                break
            hit.append(self._cached[content])
        new = self.needed(tokens) - len(hit)
        if new > self.free - sum(block in self._free for block in hit):
            return None
        for block in hit:
            self._free.pop(block, None)
            self._refs[block] = self._refs.get(block, 0) + 1
        return hit + [self._take_one() for _ in range(new)], len(hit)

    def _take_one(self) -> int:
        block, _ = self._free.popitem(last=False)
        content = self._content.pop(block, None)
        if content is not None and self._cached.get(content) == block:
            del self._cached[content]
            self.prefixes.remove(self._name(content))
        self._refs[block] = 1
        return block

    def fill(self, blocks: list[int], whole: list[int], tokens: int) -> None:
        """The KV of the first `tokens` tokens is now in these blocks; other requests can find the full ones."""
        for depth, (block, content) in enumerate(
            zip(blocks, whole[: tokens // self.block_size], strict=False), 1
        ):
            self._content[block] = content
            if content not in self._cached:
                self._cached[content] = block
                self.prefixes.add(self._name(content), depth)

    def _name(self, content: int) -> bytes:
        return (content ^ self.weights).to_bytes(NAME_BYTES)

    def contents(self, blocks: list[int]) -> list[int]:
        """The current content of these blocks, whichever request filled them; 0 for a block that is not full."""
        return [self._content.get(block, 0) for block in blocks]

    def give(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                del self._refs[block]
                self._free[block] = None

    def forget(self) -> bool:
        """Empty the prefix cache, unless a block is held; return whether it was emptied."""
        if self._refs:
            return False
        self._content.clear()
        self._cached.clear()
        self.prefixes.clear()
        return True
