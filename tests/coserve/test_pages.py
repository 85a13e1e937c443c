"""Pages that come and go, by the kernel's own count; and where the blocks of a KV buffer lie."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import textwrap

import pytest

from rose.coserve.pages import Arena, HostPagePool, KvGeometry, PageArena, PagePool, chunk_blocks, num_pages
from rose.errors import LedgerError
from rose.units import PAGE_BYTES

MIB = 1 << 20


@pytest.fixture
def arena() -> Arena:
    return HostPagePool().reserve(8 * PAGE_BYTES)


def test_a_reservation_costs_no_memory_and_is_aligned(arena: Arena) -> None:
    huge = HostPagePool().reserve((1 << 38) + 1)
    assert huge.size == (1 << 38) + PAGE_BYTES
    assert huge.resident_bytes() == 0
    assert arena.address % PAGE_BYTES == 0
    assert len(arena.buffer) == arena.size == 8 * PAGE_BYTES
    pool: PagePool = HostPagePool()
    some: PageArena = pool.reserve(1)
    assert some.size == PAGE_BYTES


def test_resident_bytes_are_what_was_mapped_by_both_of_the_kernels_counts(arena: Arena) -> None:
    arena.map([(0, PAGE_BYTES), (3 * PAGE_BYTES, 2 * PAGE_BYTES)])
    assert arena.resident_bytes() == 3 * PAGE_BYTES
    assert [arena.resident_bytes([(page * PAGE_BYTES, PAGE_BYTES)]) // PAGE_BYTES for page in range(8)] == [
        *(1, 0, 0, 1, 1, 0, 0, 0)
    ]
    arena.unmap([(3 * PAGE_BYTES, PAGE_BYTES)])
    assert arena.resident_bytes() == arena.resident_bytes([(0, arena.size)]) == 2 * PAGE_BYTES
    arena.close()
    assert arena.resident_bytes() == 0


def test_neighbouring_arenas_do_not_count_each_others_pages() -> None:
    arenas = [HostPagePool().reserve(2 * PAGE_BYTES) for _ in range(4)]
    for number, arena in enumerate(arenas):
        arena.map([(0, PAGE_BYTES)] if number % 2 else [])
    assert [arena.resident_bytes() // PAGE_BYTES for arena in arenas] == [0, 1, 0, 1]


def test_pages_smaller_than_two_mib_move_too(arena: Arena) -> None:
    arena.map([(4096, 4096), (PAGE_BYTES, 65536)])
    arena.buffer[4096] = 7
    assert arena.resident_bytes([(4096, 4096), (PAGE_BYTES, 65536)]) == 4096 + 65536
    arena.unmap([(4096, 4096)])
    assert arena.resident_bytes([(4096, 4096)]) == 0


def test_a_use_of_released_memory_shows_whether_it_read_or_wrote(arena: Arena) -> None:
    arena.map([(0, 4 * PAGE_BYTES)])
    arena.unmap([(0, 4 * PAGE_BYTES)])
    released = [(0, arena.size)]
    assert arena.touched_bytes(released) == 0
    assert arena.buffer[PAGE_BYTES] == 0  # no memory is used, so smaps does not show it
    assert arena.resident_bytes() == 0
    assert arena.touched_bytes(released) >= 4096
    assert arena.touched_bytes([(2 * PAGE_BYTES, 6 * PAGE_BYTES)]) == 0
    arena.buffer[3 * PAGE_BYTES] = 1
    assert arena.touched_bytes([(2 * PAGE_BYTES, 6 * PAGE_BYTES)]) >= 4096


def test_ranges_longer_than_one_look_are_counted_whole() -> None:
    arena = HostPagePool().reserve(80 * PAGE_BYTES)
    mapped = [(0, PAGE_BYTES), (31 * PAGE_BYTES, 2 * PAGE_BYTES), (79 * PAGE_BYTES, PAGE_BYTES)]
    arena.map(mapped)
    assert arena.resident_bytes([(0, arena.size)]) == arena.resident_bytes(mapped) == 4 * PAGE_BYTES
    arena.close()


def test_the_reserve_of_the_pool_stays_free() -> None:
    arena = HostPagePool(reserve_bytes=1 << 50).reserve(PAGE_BYTES)
    with pytest.raises(LedgerError, match=r"of which 1024\.0 TiB stay"):
        arena.map([(0, PAGE_BYTES)])
    assert arena.resident_bytes() == 0


@pytest.mark.parametrize("guard", [False, True])
def test_contents_are_zero_after_unmap_and_map_and_others_are_untouched(guard: bool) -> None:
    arena = HostPagePool().reserve(4 * PAGE_BYTES, guard=guard)
    arena.map([(0, 4 * PAGE_BYTES)])
    view = arena.buffer
    view[:] = b"\xff" * len(view)
    arena.unmap([(PAGE_BYTES, 2 * PAGE_BYTES)])
    arena.map([(2 * PAGE_BYTES, PAGE_BYTES)])
    assert view[2 * PAGE_BYTES : 3 * PAGE_BYTES] == bytes(PAGE_BYTES)
    assert view[:PAGE_BYTES] == view[3 * PAGE_BYTES :] == b"\xff" * PAGE_BYTES


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_of_maps_and_unmaps_keeps_the_books_right(seed: int) -> None:
    rng, arena, mapped = random.Random(seed), HostPagePool().reserve(16 * 65536, guard=True), set[int]()
    for _ in range(60):
        chosen = rng.sample(range(16), rng.randint(1, 4))
        if rng.random() < 0.5:
            new = [chunk for chunk in chosen if chunk not in mapped]
            arena.map([(chunk * 65536, 65536) for chunk in new])
            mapped |= set(new)
        else:
            arena.unmap([(chunk * 65536, 65536) for chunk in chosen])
            mapped -= set(chosen)
        for chunk in range(16):
            assert arena.resident_bytes([(chunk * 65536, 65536)]) == (65536 if chunk in mapped else 0)


FAULT = """
import sys
from rose.coserve.pages import HostPagePool
from rose.units import PAGE_BYTES
case = sys.argv[1]
arena = HostPagePool().reserve(2 * PAGE_BYTES, guard=case != "unguarded")
view = arena.buffer
if case in ("released", "closed", "unguarded"):
    arena.map([(0, PAGE_BYTES)])
    view[0] = 1
    arena.unmap([(0, PAGE_BYTES)])
if case == "remapped":
    arena.map([(0, PAGE_BYTES)])
    arena.unmap([(0, PAGE_BYTES)])
    arena.map([(0, PAGE_BYTES)])
if case == "closed":
    arena.close()
if case == "overrun":
    import ctypes
    arena.map([(0, 2 * PAGE_BYTES)])
    print(ctypes.string_at(arena.address + arena.size, 1))
print(view[0])
"""


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("never mapped", -signal.SIGSEGV),
        ("released", -signal.SIGSEGV),
        ("closed", -signal.SIGSEGV),
        ("overrun", -signal.SIGSEGV),
        ("remapped", 0),
        ("unguarded", 0),
    ],
)
def test_a_guarded_arena_faults_on_use_outside_mapped_pages(case: str, code: int) -> None:
    result = subprocess.run([sys.executable, "-c", FAULT, case], capture_output=True, check=False)
    assert result.returncode == code
    assert result.stdout == (b"0\n" if code == 0 else b"")


def test_more_than_the_machine_has_is_an_error_and_maps_nothing() -> None:
    arena = HostPagePool().reserve(1 << 46)
    with pytest.raises(LedgerError, match=r"64\.0 TiB asked for, .* free on this machine"):
        arena.map([(0, 1 << 46)])
    assert arena.resident_bytes() == 0
    with pytest.raises(LedgerError, match="cannot reserve"):
        HostPagePool().reserve(1 << 47)


def test_an_error_half_way_leaves_nothing_of_the_call_mapped() -> None:
    """The kernel refuses the second range, because the process may not lock or commit more."""
    code = """
    import resource
    from rose.coserve.pages import HostPagePool
    from rose.errors import LedgerError
    from rose.units import PAGE_BYTES
    arena = HostPagePool().reserve(4 * PAGE_BYTES)
    real = arena._populate
    calls = []
    def populate(address, length):
        calls.append(address)
        real(address if len(calls) == 1 else 1 << 52, length)
    arena._populate = populate
    try:
        arena.map([(0, PAGE_BYTES), (2 * PAGE_BYTES, PAGE_BYTES)])
    except LedgerError as error:
        print(error.message.split(":")[0], arena.resident_bytes(), len(calls))
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert out.stdout == "mapping 2.0 MiB failed 0 2\n"


@pytest.mark.parametrize("bad", [(-4096, 4096), (0, 0), (0, 8 * PAGE_BYTES + 4096), (1, 4096), (0, 100)])
def test_ranges_outside_or_unaligned_are_refused(arena: Arena, bad: tuple[int, int]) -> None:
    for call in (arena.map, arena.unmap, arena.resident_bytes):
        with pytest.raises(LedgerError, match="ranges"):
            call([(0, 4096), bad])
    assert arena.resident_bytes() == 0


def test_a_closed_arena_refuses_and_may_be_closed_again(arena: Arena) -> None:
    arena.close()
    arena.close()
    for use in (lambda: arena.map([(0, 4096)]), lambda: arena.unmap([(0, 4096)]), lambda: arena.buffer):
        with pytest.raises(LedgerError, match="closed"):
            use()


def test_addresses_live_until_the_last_view_is_gone() -> None:
    arena = HostPagePool().reserve(PAGE_BYTES)
    view, address = arena.buffer, arena.address
    arena.close()
    assert _is_reserved(address)
    view.release()
    del view, arena
    assert not _is_reserved(address)


def _is_reserved(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        spans = [line.split(None, 1)[0].split("-") for line in maps]
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


# --- geometry ---


def brute_force(geometry: KvGeometry, blocks: range) -> set[int]:
    found = set[int]()
    for offset, block_stride, layer_stride, num_layers, page_bytes in geometry.entries:
        for layer in range(num_layers):
            for block in blocks:
                start = offset + layer * layer_stride + block * block_stride
                found |= set(range(start, start + page_bytes))
    return found


def random_geometry(rng: random.Random) -> KvGeometry:
    """One or two groups of layers, layers or blocks outermost, with and without gaps."""
    num_blocks = rng.randint(1, 12)
    entries: list[tuple[int, int, int, int, int]] = []
    at = rng.choice([0, 0, 8])
    for _ in range(rng.randint(1, 2)):
        layers, page, gap = rng.randint(1, 4), rng.choice([1, 2, 3, 4]), rng.choice([0, 0, 1])
        if rng.random() < 0.5:
            entries.append((at, page + gap, (page + gap) * num_blocks, layers, page))
        else:
            entries.append((at, (page + gap) * layers, page + gap, layers, page))
        at += (page + gap) * layers * num_blocks
    return KvGeometry(num_blocks, entries)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(200))
def test_ranges_are_exactly_the_bytes_of_the_blocks_sorted_and_merged(seed: int) -> None:
    rng = random.Random(seed)
    geometry = random_geometry(rng)
    start = rng.randint(0, geometry.num_blocks)
    blocks = range(start, rng.randint(start, geometry.num_blocks))
    ranges = geometry.ranges(blocks)
    covered = {byte for offset, length in ranges for byte in range(offset, offset + length)}
    assert covered == brute_force(geometry, blocks)
    assert sum(length for _, length in ranges) == len(covered)
    ends = [(offset, offset + length) for offset, length in ranges]
    assert all(one[1] < two[0] for one, two in itertools.pairwise(ends))
    assert max(covered, default=0) < geometry.total_bytes


@pytest.mark.parametrize("seed", range(200))
def test_chunk_blocks_is_the_smallest_page_exact_run(seed: int) -> None:
    rng = random.Random(1000 + seed)
    num_blocks, layers, page = rng.randint(1, 24), rng.randint(1, 3), rng.choice([1, 2, 3, 4, 6])
    if rng.random() < 0.5:
        geometry = KvGeometry(num_blocks, [(0, page, page * num_blocks, layers, page)])
    else:
        geometry = KvGeometry(num_blocks, [(0, page * layers, page, layers, page)])
    os_page = rng.choice([1, 2, 4, 8])

    def exact(size: int) -> bool:
        if size * geometry.entries[0][1] % os_page:
            return False  # the next chunk would start inside a page
        ranges = [r for chunk in range(num_blocks // size) for r in geometry.chunk_ranges(chunk, size)]
        return all(offset % os_page == 0 and length % os_page == 0 for offset, length in ranges)

    expected = next((size for size in range(1, num_blocks + 1) if exact(size)), None)
    if expected is None:
        with pytest.raises(LedgerError, match="num_blocks: no run of block ids is whole pages"):
            chunk_blocks(geometry, os_page)
    else:
        assert chunk_blocks(geometry, os_page) == expected


def test_the_shapes_of_an_8b_model() -> None:
    """36 layers, 64 KiB per block and layer: 32 ids = 72 MiB with layers outermost, 8 ids = 18 MiB else."""
    block = 64 * 1024
    layers_outer = KvGeometry(320, [(0, block, 320 * block, 36, block)])
    blocks_outer = KvGeometry(320, [(0, 36 * block, block, 36, block)])
    assert chunk_blocks(layers_outer) == 32
    assert chunk_blocks(blocks_outer) == 8
    assert num_pages(layers_outer.chunk_ranges(1, 32)) == 36
    assert num_pages(blocks_outer.chunk_ranges(1, 8)) == 9
    assert len(layers_outer.chunk_ranges(1, 32)) == 36
    assert blocks_outer.chunk_ranges(1, 8) == [(18 * MIB, 18 * MIB)]
    with pytest.raises(LedgerError, match="multiple of 32"):
        chunk_blocks(KvGeometry(321, [(0, block, 321 * block, 36, block)]))


@pytest.mark.parametrize(
    ("num_blocks", "entry", "field"),
    [
        (0, (0, 1, 1, 1, 1), "num_blocks"),
        (4, (-1, 1, 1, 1, 1), "entries"),
        (4, (0, 1, 1, 0, 1), "entries"),
        (4, (0, 1, 4, 1, 2), "entries"),
        (4, (0, 2, 1, 2, 2), "entries"),
    ],
)
def test_impossible_geometries_are_refused(num_blocks: int, entry: tuple[int, ...], field: str) -> None:
    with pytest.raises(LedgerError, match=field):
        KvGeometry(num_blocks, [entry])  # type: ignore[list-item]
    with pytest.raises(LedgerError, match="blocks"):
        KvGeometry(4, [(0, 1, 4, 1, 1)]).ranges(range(3, 5))
