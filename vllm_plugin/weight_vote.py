"""Whether all ranks of an engine may commit: what :mod:`vllm_plugin.rank_weights` reports of each, judged together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rose.errors import SectionCorrupt, WeightsError, WrongBase
from rose.lineage import WeightVersion
from rose.weights import statehash
from vllm_plugin.staged_update import UpdatePhase


def judge(reports: Sequence[Mapping[str, Any]], target: WeightVersion) -> None:
    """All ranks have staged ``target``, and the tensors they share add up; otherwise raise.

    Raises:
        WeightsError: Some rank said no, or is not ready.
        WrongBase, SectionCorrupt: The sum over the ranks of a tensor's hash is not the header's.
    """
    for rank, report in enumerate(reports):
        if report["phase"] != UpdatePhase.STAGED or report["target"] != str(target):
            why = f": {report['error']['message']}" if report["error"] else ""
            raise WeightsError(
                f"{target} is not staged on rank {rank}, which is {report['phase']}{why}", field="version"
            )
    if len({(report["header"], report["target_run"]) for report in reports}) != 1:
        raise WeightsError("the ranks have staged different files; stage it again", field="version")
    for name in sorted({name for report in reports for name in report["partial"]}):
        rows = [report["partial"][name] for report in reports if name in report["partial"]]
        parts = {str(row["parts"]["regions"]): row["parts"] for row in rows}  # replicas count once
        num_elements = sum(part["num_elements"] for part in parts.values())
        if num_elements != rows[0]["num_elements"]:
            raise WeightsError(
                f"the ranks hold {num_elements} of {rows[0]['num_elements']} elements", field=name
            )
        for side, error in (("before", WrongBase), ("after", SectionCorrupt)):
            if rows[0][side] is None:
                continue
            total = 0
            for part in parts.values():
                total = statehash.add(total, statehash.from_hex(part[side]))
            if statehash.to_hex(total) != rows[0][side]:
                raise error(
                    f"the ranks hold {statehash.to_hex(total)} {side}, the header says {rows[0][side]}",
                    field=name,
                )
