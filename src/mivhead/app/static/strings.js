// The texts of the page, in the language of the reader. A language is one file with the keys of
// strings.en.js. Messages about a single photo come from the server.
import { de } from "./strings.de.js";
import { en } from "./strings.en.js";

const TEXTS = { en, de };
const KEY = "miv-language";
const wanted = [localStorage.getItem(KEY), ...navigator.languages.map((each) => each.slice(0, 2))];

export const languages = Object.entries(TEXTS).map(([key, texts]) => [key, texts.language]);
export const language = wanted.find((each) => each in TEXTS) ?? "en";
export const t = TEXTS[language];
export const say = (change) => (change ? (t.actions[change.action]?.(change) ?? change.action) : "");
export { percent } from "./numbers.js";

document.documentElement.lang = language;
export const setLanguage = (name) => (localStorage.setItem(KEY, name), location.reload());
