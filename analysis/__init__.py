"""Tables, figures, statistics and the report; reads ``outputs/`` only (docs/statistics.md)."""
