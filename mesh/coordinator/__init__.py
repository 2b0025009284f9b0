"""Coordinator: proposes, sends windows around the ring and commits verdicts. Holds no layers."""
