"""Twenty questions of different kinds; some answers repeat what was asked, some repeat themselves."""

CHAT_PROMPTS = (
    "Explain to a child why the sea is salty.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "List the steps to change a flat bicycle tyre.",
    "What are the main differences between a virus and a bacterium?",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "Describe a walk through a forest in autumn.",
    "How does compound interest work? Give an example with numbers.",
    "Compare trains and aeroplanes for a journey of five hundred kilometres.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "Translate into German: I would like a cup of coffee and a piece of cake, please.",
    "Count from one to thirty in words.",
    "Schreibe ein kurzes Gedicht über den Regen.",
    "用中文介绍一下北京。",
    "Rewrite in the past tense: She opens the door, looks at the garden, and smiles at the old tree.",
    'Write a JSON object with the keys "name", "age", "city" and "hobbies" for three people.',
    "What is 17 times 23? Show every step.",
    "Give me a recipe for pancakes with exact amounts.",
    "Write an HTML page with a table of five countries and their capitals.",
    "Summarise the plot of Romeo and Juliet.",
    "Why is the sky blue? 🌈 Answer with many emojis.",
)
