"""Diagnosis of distributed training from traces: who waits for whom, why, and what would help.

After dPRO (arXiv 2205.02473, "A Generic Performance Diagnosis and Optimization Toolkit for
Expediting Distributed DNN Training").
"""
