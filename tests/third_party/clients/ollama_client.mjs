// Ollama's library for JavaScript, as its users call it.
import assert from "node:assert/strict";
import { Ollama } from "ollama";
import { run } from "./checking.mjs";

const client = new Ollama({ host: process.env.ROOT_URL });
const messages = [{ role: "user", content: "What is the capital of Avaria?" }];
const answer = "The capital of Avaria is Limora.";
const options = { temperature: 0 };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "Get the weather", parameters } }];
const weather = [{ role: "user", content: "What is the weather in Oslo?" }];

await run({
  async chat() {
    const found = await client.chat({ model: "demo", messages, options });
    assert.equal(found.message.content, answer);
    assert.ok(found.done && found.eval_count > 0);
  },
  async "chat streamed"() {
    let text = "", last;
    for await (const part of await client.chat({ model: "demo", messages, options, stream: true })) {
      text += part.message.content;
      last = part;
    }
    assert.equal(text, answer);
    assert.ok(last.done && last.total_duration > 0);
  },
  async generate() {
    const found = await client.generate({ model: "demo", prompt: messages[0].content, options });
    assert.equal(found.response, answer);
  },
  async "generate streamed"() {
    let text = "";
    for await (const part of await client.generate({ model: "demo", prompt: messages[0].content, options, stream: true })) {
      text += part.response;
    }
    assert.equal(text, answer);
  },
  async "tools round trip"() {
    const called = await client.chat({ model: "scripted", messages: weather, tools });
    assert.deepEqual(called.message.tool_calls[0].function.arguments, { city: "Oslo" });
    const result = { role: "tool", tool_name: "get_weather", content: "7 degrees" };
    const final = await client.chat({ model: "scripted", messages: [...weather, called.message, result], tools });
    assert.equal(final.message.content, "It is 7 degrees in Oslo.");
  },
  async embed() {
    assert.equal((await client.embed({ model: "embedder", input: ["one", "two"] })).embeddings.length, 2);
    assert.ok((await client.embeddings({ model: "embedder", prompt: "one" })).embedding.length > 8);
  },
  async "list, ps and show"() {
    assert.ok((await client.list()).models.some((one) => one.name === "demo"));
    assert.ok((await client.ps()).models.some((one) => one.name === "demo" && one.size > 0));
    assert.ok((await client.show({ model: "demo" })).capabilities.includes("completion"));
    assert.ok((await client.version()).version);
  },
  async pull() {
    assert.equal((await client.pull({ model: "demo" })).status, "success");
    for await (const part of await client.pull({ model: "demo", stream: true })) assert.equal(part.status, "success");
  },
  async "what is not served is refused by name"() {
    await assert.rejects(client.create({ model: "new", from: "demo" }), /not created/);
    await assert.rejects(client.copy({ source: "demo", destination: "other" }), /not copied/);
    await assert.rejects(client.push({ model: "demo" }), /not published/);
    await assert.rejects(client.delete({ model: "demo" }), /not deleted/);
    await assert.rejects(client.generate({ model: "demo", keep_alive: 0 }), /keep_alive/);
    await assert.rejects(client.chat({ model: "nothing", messages }), /nothing/);
  },
  async cancel() {
    const stream = await client.generate({
      model: "demo", prompt: "Tell me a story about a fox.", options: { num_predict: 400 }, stream: true,
    });
    await assert.rejects(async () => {
      for await (const part of stream) stream.abort();
    }, /abort/i);
  },
});
