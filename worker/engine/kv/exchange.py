"""The exchange of cached blocks with other engines: a block travels as its copy in host memory.

export    resident --offload--> copy --read--> another engine
put       another engine --write--> copy, which sequences then reuse like any other
"""

from array import array

from tokenbus.protocol.wire import block_hash
from tokenbus.worker.engine.kv.prefix_cache import PrefixCache
from tokenbus.worker.engine.kv.prefix_tree import Block, Domain


def export(
    cache: PrefixCache, domain: Domain, token_ids: "array[int]", first: int, max_blocks: int, *, is_last: bool
) -> tuple[int, list[int]]:
    """Returns how many blocks of a prefix are cached, and the ids of the copies of up to `max_blocks` from `first` on.

    The list is shorter where there is no room for a copy."""
    path = cache.tree.known_path(domain, token_ids)
    wanted, kept = path[first : first + max_blocks], set(path)
    cache.host.set_limits(offloads=len(wanted), onloads=0)
    copies: list[int] = []
    for block in wanted:
        if block.host_copy is None:
            if not _make_room(cache, kept):
                break
            cache.host.offload(block, block.any_lane)
        assert block.host_copy is not None
        copies.append(block.host_copy)
    cache.host.set_limits(offloads=0, onloads=0)
    if is_last:
        cache.demote(path)
    else:
        _touch(cache, path)
    return len(path), copies


def put(cache: PrefixCache, domain: Domain, token_ids: "array[int]", first: int, num_blocks: int) -> list[int | None]:
    """Returns the id of a new copy for each block from `first` on, or None for one that is known; the caller has the
    contents. The list ends early where there is no room for another copy, and is empty if a block before is missing."""
    path = cache.tree.known_path(domain, token_ids)[: first + num_blocks]
    if len(path) < first:
        return []
    copies: list[int | None] = [None] * (len(path) - first)
    kept = set(path)  # what leads to the new blocks must not be discarded for them
    root = cache.tree.make_root(domain)
    root.ref_count += 1  # making room may remove the last block of this domain
    node: Block = path[-1] if path else root
    while len(copies) < num_blocks and (end := node.end + cache.block_size) <= len(token_ids):
        if not _make_room(cache, kept):
            break
        tokens = block_hash.pack_token_ids(token_ids[node.end : end])
        for partial in node.proper_prefixes(tokens):
            cache.remove_partial(partial)
        node = cache.tree.insert(node, tokens)
        copies.append(cache.host.adopt(node))
        path.append(node)
        kept.add(node)
    _touch(cache, path)
    root.ref_count -= 1
    cache.tree.prune(root)
    return copies


def _touch(cache: PrefixCache, path: list[Block]) -> None:
    """Makes the blocks of a path the last to be discarded, those at its beginning last of all: without them the others
    are of no use."""
    for block in reversed(path):
        cache.host.touch(block)


def _make_room(cache: PrefixCache, kept: set[Block]) -> bool:
    """Makes room for one more copy; returns False if that would cost one of the blocks to keep."""
    host = cache.host
    while host.is_full:
        if not host.capacity or host.oldest in kept:
            return False
        cache.discard_oldest_copy()
    return True
