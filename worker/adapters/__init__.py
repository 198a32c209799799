"""LoRA adapters by name and tenant, and folders that are watched for them."""
