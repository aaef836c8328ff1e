"""Bytes on a disk that outlive the run."""
