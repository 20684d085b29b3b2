"""Mixture-of-experts: DeepSpeed's layers and AutoEP's."""
