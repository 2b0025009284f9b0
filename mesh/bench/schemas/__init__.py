"""`mesh bench schemas`: whether answers keep to JSON Schemas, whatever a small model would rather say."""
