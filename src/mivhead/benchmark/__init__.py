"""The benchmark: tasks x methods, features extracted once, paired statistics, reports."""
