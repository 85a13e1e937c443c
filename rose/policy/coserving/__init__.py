"""Who may use which chunk of KV memory: the books of the two engines of a device, pure.

Each engine has its own memory, cut into the same kind of *chunks*; what the engines share is a number, how many pages the device
has.  An engine core keeps a book (:mod:`~rose.policy.coserving.serving`, :mod:`~rose.policy.coserving.rollout`) and never touches
memory.  Its workers' *pagers* do: they read the core's *marks* (one per chunk: wanted or not, under a rising *generation*)
and *report* (one state per chunk, and the generation that they act by).

::

    state      mark  who may use it         counted as held   leaves it when
    USED       1     steps, the block pool  yes               the engine thread takes it out of the pool       -> LEAVING
    LEAVING    0     steps up to a number   yes               every rank reports it unmapped, by that mark    -> GONE
                                                              it is wanted back                               -> COMING
    GONE       0     nobody                 no                it is wanted back, and the peer's number allows -> COMING
    COMING     1     nobody                 yes               every rank reports it mapped, by that mark      -> USED
                                                              it is given up before it came (rollout only)    -> LEAVING

**Conservation.**  What an engine says it holds (``reserved_pages`` of its lease) covers, at every instant, all its chunks that
are not GONE.  It says so *before* it reads the peer's number, and marks nothing GONE as wanted beyond what that number leaves.
Of two that grow at once at least one sees the other.

**Acknowledged, not guessed.**  A report counts for a chunk only if it names the generation that set the chunk's mark, or a later one.
An older report may call a chunk unmapped while the pager is about to map it for a mark that has been taken back since.  If that
counted, the page would go to the peer and exist twice.  Reports and marks are in different files and need no order between them; it
is enough that whoever reads a report's generation then reads states that are at least as new.
"""
