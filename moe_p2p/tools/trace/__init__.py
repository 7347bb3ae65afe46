"""Traces: what ranks did, on one clock: recorded here, written for Perfetto, and judged."""
