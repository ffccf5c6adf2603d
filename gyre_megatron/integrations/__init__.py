"""What users of other systems call."""
