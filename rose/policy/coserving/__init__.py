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

**Acknowledged, not guessed.**  A report counts for a chunk only if it was made by the generation that set the chunk's mark, or a
later one.  An older report may say "unmapped" of a chunk that the pager is just about to map for a wish that has been taken back
since: counted as gone, its page would be given to the peer and be there twice.  The rule needs no order between the two files
but the one that each has for itself: who reads a report's generation finds, behind it, states at least as new.
"""
