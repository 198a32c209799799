// Runs checks and prints a line for each: `ok NAME` or `not ok NAME: REASON`.
export async function run(checks) {
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      console.log(`ok ${name}`);
    } catch (error) {
      console.log(`not ok ${name}: ${`${error}`.replaceAll("\n", " ").slice(0, 500)}`);
    }
  }
  process.exit(0);
}
