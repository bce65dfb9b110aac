"""Controller half of Paceline: configuration, content key, launch, record. It never imports torch."""
