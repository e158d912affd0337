// Numbers as texts. A share is 100 % or 0 % only if it is exactly that, as on the command line.
export const percent = (p) => {
  if (p >= 0.995 && p < 1) return ">99\u00a0%";
  return p > 0 && p < 0.005 ? "<1\u00a0%" : `${Math.round(100 * p)}\u00a0%`;
};

// The first few of some names, and how many there are besides.
export const few = (names, and, more, most = 3) => {
  if (names.length > most + 1) return `${names.slice(0, most).join(", ")} ${and} ${more(names.length - most)}`;
  return names.length > 1 ? `${names.slice(0, -1).join(", ")} ${and} ${names.at(-1)}` : names[0];
};
