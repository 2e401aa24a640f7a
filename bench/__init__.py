"""Measure served drafts on tasks, compare them soundly with the plain verifier, and report. No torch in here."""
