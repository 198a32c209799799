"""The boundary to the device: what runs step plans, samples from their logits and pools."""
