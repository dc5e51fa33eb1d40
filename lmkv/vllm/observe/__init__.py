"""Watches the scheduler side: metrics, reasons for misses, recent requests, KV events. Decides nothing."""
