"""The report: one page that shows, measures and says how it was measured."""

from simforcing.evaluate.report.data import (
    Clip,
    GuidanceCurve,
    HorizonCurve,
    ReportData,
    Row,
    Timing,
    TrainingCurve,
    WhatRan,
)
from simforcing.evaluate.report.page import write_report
from simforcing.evaluate.report.wording import Verdict, action_verdict, verdict

__all__ = [
    "Clip",
    "GuidanceCurve",
    "HorizonCurve",
    "ReportData",
    "Row",
    "Timing",
    "TrainingCurve",
    "Verdict",
    "WhatRan",
    "action_verdict",
    "verdict",
    "write_report",
]
