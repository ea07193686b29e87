"""Panels: what a report shows of the audits of one surface."""
