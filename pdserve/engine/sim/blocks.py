"""The simulated engine's KV cache: a pool of blocks with reference counts and a prefix cache."""

from collections import OrderedDict


def block_hashes(prompt: list[int], block_size: int, weights: int = 0) -> list[int]:
    """One hash for each full block, chained, so that equal hashes mean equal prefixes under equal weights."""
    hashes: list[int] = []
    parent = weights
    for end in range(block_size, len(prompt) + 1, block_size):
        parent = hash((parent, *prompt[end - block_size : end]))
        hashes.append(parent)
    return hashes


class BlockPool:
    """Blocks that no request holds keep their content until they are needed again, least recently freed first."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.weights = 0
        """which weights the engine has loaded: other weights make other KV"""
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

    def hit(self, prompt: list[int]) -> list[int]:
        """Blocks in the cache that hold the prompt's prefix; as in vLLM the last token never counts as cached."""
        found: list[int] = []
        for content in block_hashes(prompt[:-1], self.block_size, self.weights):
            if content not in self._cached:
                break
            found.append(self._cached[content])
        return found

    def take(self, prompt: list[int], tokens: int) -> tuple[list[int], int] | None:
        """Blocks for `tokens` tokens, beginning with the prompt's cached prefix, and how many blocks that prefix has.
        None where too few are free."""
        hit = self.hit(prompt)
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
        self._refs[block] = 1
        return block

    def fill(self, blocks: list[int], prompt: list[int]) -> None:
        """The prompt's KV is in these blocks now; other requests can find the full ones."""
        for block, content in zip(blocks, block_hashes(prompt, self.block_size, self.weights), strict=False):
            self._content[block] = content
            self._cached.setdefault(content, block)

    def expected(self, prompt: list[int]) -> list[int]:
        """What `contents` should say of the blocks of this prompt, full blocks only."""
        return block_hashes(prompt, self.block_size, self.weights)

    def contents(self, blocks: list[int]) -> list[int]:
        """What lies in these blocks now, of any request; 0 for a block that is not full."""
        return [self._content.get(block, 0) for block in blocks]

    def give(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                del self._refs[block]
                self._free[block] = None

    def forget(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while a block is held."""
        if self._refs:
            return False
        self._content.clear()
        self._cached.clear()
        return True
