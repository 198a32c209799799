// OpenAI's library for JavaScript, as its users call it.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { run } from "./checking.mjs";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const question = [{ role: "user", content: "What is the capital of Avaria?" }];
const answer = "The capital of Avaria is Limora.";
const weather = [{ role: "user", content: "What is the weather in Oslo?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];

await run({
  async chat() {
    const found = await client.chat.completions.create({ model: "demo", messages: question, temperature: 0 });
    assert.equal(found.choices[0].message.content, answer);
  },
  async streaming() {
    const events = await client.chat.completions.create({
      model: "demo", messages: question, temperature: 0, stream: true, stream_options: { include_usage: true },
    });
    let text = "", usage;
    for await (const event of events) {
      text += event.choices[0]?.delta.content ?? "";
      usage = event.usage;
    }
    assert.equal(text, answer);
    assert.ok(usage.completion_tokens > 0);
  },
  async "tools round trip"() {
    const runner = client.chat.completions.runTools({
      model: "scripted",
      messages: weather,
      tools: [{ type: "function", function: { name: "get_weather", parameters, parse: JSON.parse, function: () => "7 degrees" } }],
    });
    assert.equal(await runner.finalContent(), "It is 7 degrees in Oslo.");
  },
  async "tools streamed"() {
    const stream = client.chat.completions.stream({ model: "scripted", messages: weather, tools });
    const message = await stream.finalMessage();
    assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { city: "Oslo" });
  },
  async schema() {
    const schema = {
      type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"], additionalProperties: false,
    };
    const found = await client.chat.completions.parse({
      model: "demo", messages: question, temperature: 0,
      response_format: { type: "json_schema", json_schema: { name: "capital", strict: true, schema } },
    });
    assert.equal(typeof found.choices[0].message.parsed.city, "string");
  },
  async reasoning() {
    const asked = [{ role: "user", content: "Which is larger, 9.11 or 9.9?" }];
    const found = await client.chat.completions.create({ model: "scripted", messages: asked });
    assert.equal(found.choices[0].message.reasoning_content, "Compare 0.11 and 0.90.");
    assert.equal(found.choices[0].message.content, "9.9 is larger.");
  },
  async embeddings() {
    const found = await client.embeddings.create({ model: "embedder", input: ["a fox", "a river"] });
    assert.equal(found.data.length, 2);
    assert.equal(found.data[0].embedding.length, found.data[1].embedding.length);
    assert.ok(found.data[0].embedding.some((number) => number !== 0));
  },
  async responses() {
    const found = await client.responses.create({ model: "scripted", input: "Which is larger, 9.11 or 9.9?", store: false });
    assert.equal(found.output_text, "9.9 is larger.");
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ model: "nobody", messages: question }), OpenAI.NotFoundError);
    await assert.rejects(
      client.chat.completions.create({ model: "demo", messages: question, temperature: -1 }), OpenAI.BadRequestError,
    );
  },
  async cancel() {
    const messages = [{ role: "user", content: "Say something long." }];
    const events = await client.chat.completions.create({ model: "scripted", messages, max_tokens: 60_000, stream: true });
    for await (const event of events) if (event.choices[0].delta.content) break;
  },
});
