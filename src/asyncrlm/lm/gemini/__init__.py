"""Google's Gemini API, and Vertex AI."""
