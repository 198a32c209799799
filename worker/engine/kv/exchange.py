"""The exchange of cached blocks with other engines: a block travels as its copy in host memory.

export    resident --offload--> copy --read--> another engine
put       another engine --write--> copy, which sequences then reuse like any other
"""

import contextlib
from array import array
from collections.abc import Iterator

from tokenbus.protocol.wire import block_hash
from tokenbus.worker.engine.kv.prefix_cache import PrefixCache
from tokenbus.worker.engine.kv.prefix_tree import Block, Domain


def export(
    cache: PrefixCache, domain: Domain, token_ids: "array[int]", first: int, max_blocks: int, *, is_last: bool
) -> tuple[int, list[int]]:
    """Returns how many blocks of a prefix are cached, and the ids of the copies of up to `max_blocks` from `first` on.

    The list is shorter if there is no room for a copy."""
    path = cache.tree.known_path(domain, token_ids)
    copies: list[int] = []
    cache.host.set_limits(offloads=max_blocks, onloads=0)
    with _in_use(cache, path):
        for block in path[first : first + max_blocks]:
            if block.host_copy is None:
                if not cache.make_room_for_copy():
                    break
                cache.host.offload(block, block.any_lane)
            assert block.host_copy is not None
            copies.append(block.host_copy)
    cache.host.set_limits(offloads=0, onloads=0)
    if is_last:
        cache.demote(path)
    return len(path), copies


def put(cache: PrefixCache, domain: Domain, token_ids: "array[int]", first: int, num_blocks: int) -> list[int | None]:
    """Returns the id of a new copy for each block from `first` on, or None for a known one; the caller has the
    contents. The list ends early if there is no room for another copy, and is empty if an earlier block is missing or
    the prefix is too short to be cached."""
    path = cache.tree.known_path(domain, token_ids)[: first + num_blocks]
    if len(path) < first or (first + num_blocks) * cache.block_size < cache.min_prefix_tokens:
        return []
    copies: list[int | None] = [None] * (len(path) - first)
    root = cache.tree.make_root(domain)
    root.ref_count += 1  # making room may remove the last block of this domain
    node: Block = path[-1] if path else root
    with _in_use(cache, path):  # the ancestors of the new blocks must not be discarded for them
        while len(copies) < num_blocks and (end := node.end + cache.block_size) <= len(token_ids):
            if not cache.make_room_for_copy():
                break
            tokens = block_hash.pack_token_ids(token_ids[node.end : end])
            for partial in node.proper_prefixes(tokens):
                cache.remove_partial(partial)
            node = cache.tree.insert(node, tokens)
            copies.append(cache.host.adopt(node))
            node.ref_count += 1
            path.append(node)
    root.ref_count -= 1
    cache.tree.prune(root)
    return copies


@contextlib.contextmanager
def _in_use(cache: PrefixCache, path: list[Block]) -> Iterator[None]:
    """Keeps the copies of a path, which may grow meanwhile, and makes them the last to be discarded: those at its
    beginning last of all, since the others are useless without them."""
    for block in path:
        block.ref_count += 1
    yield
    for block in reversed(path):
        block.ref_count -= 1
        cache.host.touch(block)
