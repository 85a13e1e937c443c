"""Where one service may answer: several addresses, of which one is active."""

from __future__ import annotations


class Addresses:
    """Args:
    urls: One base URL, or several with commas between them: a scheduler's and its stand-by's.
    """

    def __init__(self, urls: str) -> None:
        self.all = [url.strip().rstrip("/") for url in urls.split(",") if url.strip()] or [urls]
        self.current = self.all[0]

    def leave(self, url: str) -> bool:
        """``url`` did not answer, or is not active: the next one is to be asked.  False where there is no other.

        Of many who ask at once and all hear it from the same address, the first moves on for all.
        """
        if url == self.current:
            self.current = self.all[(self.all.index(url) + 1) % len(self.all)]
        return self.current != url
