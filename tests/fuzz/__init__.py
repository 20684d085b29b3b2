"""Damaged, forged and drawn checkpoints with fresh seeds (`make fuzz SECONDS=600`).

A kind and a number determine a case. It may only raise a `UcpError`, in little time and memory, and a load that is not
refused restores the saved bits.
"""
