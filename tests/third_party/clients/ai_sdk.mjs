// Vercel's AI SDK, over its providers for compatible servers, OpenAI's responses and Anthropic's messages.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";
import { run } from "./checking.mjs";

const compatible = createOpenAICompatible({
  name: "tokenbus", baseURL: process.env.BASE_URL, supportsStructuredOutputs: true, includeUsage: true,
});
const openai = createOpenAI({ baseURL: process.env.BASE_URL, apiKey: "none" });
const anthropic = createAnthropic({ baseURL: process.env.BASE_URL, apiKey: "none" });
const question = "What is the capital of Avaria?";
const answer = "The capital of Avaria is Limora.";
const get_weather = tool({
  description: "Tells the weather", inputSchema: z.object({ city: z.string() }), execute: async () => "7 degrees",
});
const task = { prompt: "What is the weather in Oslo?", tools: { get_weather }, stopWhen: isStepCount(3), maxRetries: 0 };

async function carryOut(model, providerOptions) {
  const found = await generateText({ model, ...task, providerOptions });
  assert.equal(found.text, "It is 7 degrees in Oslo.");
  assert.equal(found.steps.length, 2);
}

await run({
  async chat() {
    const found = await generateText({ model: compatible("demo"), prompt: question, temperature: 0, maxRetries: 0 });
    assert.equal(found.text, answer);
    assert.ok(found.usage.outputTokens > 0);
  },
  async streaming() {
    const stream = streamText({ model: compatible("demo"), prompt: question, temperature: 0, maxRetries: 0 });
    let text = "";
    for await (const part of stream.textStream) text += part;
    assert.equal(text, answer);
    assert.ok((await stream.usage).outputTokens > 0);
  },
  async "tools round trip"() {
    await carryOut(compatible("scripted"));
  },
  async "tools streamed"() {
    const stream = streamText({ model: compatible("scripted"), ...task });
    await stream.consumeStream();
    assert.equal(await stream.text, "It is 7 degrees in Oslo.");
  },
  async schema() {
    const output = Output.object({ schema: z.object({ city: z.string().max(20), isLarge: z.boolean() }) });
    const found = await generateText({ model: compatible("demo"), prompt: question, temperature: 0, output, maxRetries: 0 });
    assert.equal(typeof found.output.city, "string");
    assert.equal(typeof found.output.isLarge, "boolean");
  },
  async reasoning() {
    const found = await generateText({ model: compatible("scripted"), prompt: "Which is larger, 9.11 or 9.9?", maxRetries: 0 });
    assert.equal(found.reasoningText, "Compare 0.11 and 0.90.");
    assert.equal(found.text, "9.9 is larger.");
  },
  async embeddings() {
    const model = compatible.embeddingModel("embedder");
    const found = await embedMany({ model, values: ["a fox", "a river"], maxRetries: 0 });
    assert.equal(found.embeddings[0].length, found.embeddings[1].length);
  },
  async "responses, tools round trip"() {
    await carryOut(openai.responses("scripted"), { openai: { store: false } });
  },
  async "responses, tools round trip by references to stored items"() {
    await carryOut(openai.responses("scripted"));
  },
  async "messages, tools round trip"() {
    await carryOut(anthropic("scripted"));
  },
  async errors() {
    const asked = generateText({ model: compatible("nobody"), prompt: question, maxRetries: 0 });
    await assert.rejects(asked, (error) => error.statusCode === 404);
  },
  async cancel() {
    const controller = new AbortController();
    const stream = streamText({
      model: compatible("scripted"), prompt: "Say something long.", maxOutputTokens: 60_000, maxRetries: 0,
      abortSignal: controller.signal,
    });
    for await (const part of stream.textStream) if (part) controller.abort();
  },
});
