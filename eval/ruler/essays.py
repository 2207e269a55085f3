"""The essay haystack: Paul Graham's essays in the order of RULER's download script."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

REPOSITORY_WORDS = 111_877
"""Words of the 49 essays that come first; beyond them RULER's text differs from machine to machine."""

_REPOSITORY_CHARACTERS = 643_830
_REPOSITORY_SHA256 = "b3a70ebc054f2eab5057baf3c4b7e857711472be8086240a516fd29b648ad857"
"""Of the 49 essays joined in official order, as UTF-8."""

# Start and length in characters, within the packaged text, of the 49 plain-text essays in
# the alphabetical order of their file names (addiction, aord, apple, avg, ... worked), which the
# official script sorts by; found by searching for each file of the repository it downloads.
# fmt: off
_PACKAGED_SPANS = (
    (536_446, 7_436), (604_435, 8_501), (281_502, 12_406), (431_309, 25_387),
    (618_301, 25_529), (465_904, 3_368), (196_931, 14_317), (612_936, 5_365),
    (1_285, 7_086), (9_026, 14_988), (600_204, 4_231), (425_050, 6_259),
    (182_146, 4_542), (514_070, 2_261), (72_787, 32_640), (222_165, 11_455),
    (354_465, 29_511), (211_248, 6_051), (186_688, 10_243), (70_330, 2_457),
    (269_702, 4_068), (497_241, 3_685), (252_748, 16_954), (293_908, 24_563),
    (24_014, 25_517), (543_882, 3_898), (273_770, 7_732), (464_162, 1_742),
    (469_272, 27_969), (556_935, 43_269), (8_371, 655), (105_427, 2_056),
    (459_261, 55), (49_531, 20_799), (318_471, 27_038), (500_926, 13_144),
    (456_696, 2_565), (516_331, 20_115), (0, 1_285), (383_976, 3_024),
    (387_000, 16_197), (547_780, 9_155), (345_509, 8_956), (217_299, 4_866),
    (461_422, 2_740), (233_620, 19_128), (459_316, 2_106), (403_197, 21_853),
    (107_483, 74_663),
)
# fmt: on


def official_order(packaged: str) -> str:
    """Text in RULER's order from that of the package, which holds the same essays unsorted.

    The essays converted from web pages follow in the package's order: RULER sorts them too, but
    their borders are not marked and the official conversion varies.
    """
    repository = "".join(packaged[start : start + length] for start, length in _PACKAGED_SPANS)
    return repository + packaged[_REPOSITORY_CHARACTERS:]


def starts_officially(text: str) -> bool:
    """Whether a text begins with the 49 essays in official order."""
    return hashlib.sha256(text[:_REPOSITORY_CHARACTERS].encode()).hexdigest() == _REPOSITORY_SHA256


class Essays:
    """Words of the essays, and their sentences for any number of words.

    Parameters
    ----------
    text : str
        The whole haystack.
    punkt : Path
        Folder that holds ``english/`` with NLTK's punkt_tab parameters.
    """

    def __init__(self, text: str, punkt: Path) -> None:
        self.words = re.sub(r"\s+", " ", text).split(" ")
        self._splitter = _sentence_splitter(punkt / "english")
        self._sentences: dict[int, list[str]] = {}

    def sentences(self, count: int) -> list[str]:
        """Sentences of the first `count` words; the essays start over where they end."""
        if count not in self._sentences:
            cycles = -(-count // len(self.words))
            text = " ".join((self.words * cycles)[:count])
            self._sentences[count] = self._splitter.tokenize(text.strip())
        return self._sentences[count]


def _sentence_splitter(folder: Path):  # type: ignore[no-untyped-def]
    # NLTK finds its parameters through a global search path only, which is left alone here.
    from collections import defaultdict

    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    def rows(name: str) -> list[list[str]]:
        lines = (folder / name).read_text(encoding="utf-8").split("\n")
        return [line.split("\t") for line in lines if line]

    parameters = PunktParameters()
    parameters.collocations = {tuple(row) for row in rows("collocations.tab")}
    parameters.sent_starters = {row[0] for row in rows("sent_starters.txt")}
    parameters.abbrev_types = {row[0] for row in rows("abbrev_types.txt")}
    parameters.ortho_context = defaultdict(int, {word: int(flags) for word, flags in rows("ortho_context.tab")})
    splitter = PunktSentenceTokenizer()
    splitter._params = parameters
    return splitter
