"""The report: one page that shows, measures and says how it was measured."""

from simforcing.evaluate.report.data import (
    Clip,
    Curve,
    Grid,
    GuidanceCurve,
    HorizonCurve,
    MethodRow,
    Point,
    ReportData,
    Row,
    SensitivityRow,
    SweepView,
    Timing,
    TrainingCurve,
    WhatRan,
)
from simforcing.evaluate.report.page import write_report
from simforcing.evaluate.report.wording import Verdict, action_verdict, verdict

__all__ = [
    "Clip",
    "Curve",
    "Grid",
    "GuidanceCurve",
    "HorizonCurve",
    "MethodRow",
    "Point",
    "ReportData",
    "Row",
    "SensitivityRow",
    "SweepView",
    "Timing",
    "TrainingCurve",
    "Verdict",
    "WhatRan",
    "action_verdict",
    "verdict",
    "write_report",
]
