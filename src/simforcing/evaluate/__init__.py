"""Numbers with their protocol: metrics, intervals, pictures and the report page."""
