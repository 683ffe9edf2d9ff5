// Vercel's AI SDK, unchanged, by each way to a server that it has.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const settings = { baseURL: process.env.OPENAI_BASE_URL, apiKey: "none" };
const openai = createOpenAI(settings);
const anthropic = createAnthropic(settings);
const compatible = createOpenAICompatible({
  ...settings,
  name: "shoal",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const ways = { chat: openai.chat, responses: openai.responses, messages: anthropic, compatible };
const multiply = tool({
  description: "Multiplies two numbers.",
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  execute: ({ a, b }) => a * b,
});
const Person = z.object({ name: z.string(), age: z.number().int(), city: z.string() });

for (const [name, way] of Object.entries(ways)) {
  const asked = { model: way("shoal-tiny"), temperature: 0, maxRetries: 0, maxOutputTokens: 100 };
  const product = { ...asked, prompt: "What is 1234 * 56?", tools: { multiply } };

  describe(name, () => {
    test("a text is streamed as it is given whole", async () => {
      const content = [{ type: "text", text: "What is" }, { type: "text", text: "12 + 30?" }];
      const messages = [{ role: "user", content }];
      const question = { ...asked, system: "Be brief.", messages };
      const whole = await generateText(question);
      const stream = streamText(question);
      assert.ok(whole.text);
      assert.equal(await stream.text, whole.text);
      assert.equal(await stream.finishReason, "stop");
      assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
    });

    test("a loop of tools ends with an answer", async () => {
      const loop = { ...product, stopWhen: stepCountIs(3) };
      const whole = await generateText(loop);
      assert.deepEqual(whole.steps[0].toolCalls[0].input, { a: 1234, b: 56 });
      assert.match(whole.text, /69104/);
      const stream = streamText(loop);
      assert.equal(await stream.text, whole.text);
      assert.equal((await stream.steps).length, 2);
    });

    test("tools are demanded and forbidden", async () => {
      const prompt = "What does the scheduler do?";
      for (const toolChoice of ["required", { type: "tool", toolName: "multiply" }]) {
        const stream = streamText({ ...product, prompt, toolChoice });
        const [call] = await stream.toolCalls;
        assert.equal(call.toolName, "multiply");
        assert.equal(typeof call.input.a, "number");
      }
      const { toolCalls } = await generateText({ ...product, toolChoice: "none" });
      assert.deepEqual(toolCalls, []);
    });

    test("a text becomes an object, whole and bit by bit", async () => {
      const prompt = "As JSON: Ada is 31 and lives in Rome.";
      const object = { ...asked, prompt, output: Output.object({ schema: Person }) };
      const whole = await generateText(object);
      assert.deepEqual(Object.keys(whole.output), ["name", "age", "city"]);
      const stream = streamText(object);
      assert.deepEqual(await stream.output, whole.output);
    });

    test("a text is one of a list", async () => {
      const options = ["red", "blue"];
      const output = Output.choice({ options });
      const chosen = await generateText({ ...asked, prompt: "Which colour?", output });
      assert.ok(options.includes(chosen.output));
    });

    test("an error has its status, in a stream too", async () => {
      const wrong = { ...asked, model: way("whale"), prompt: "Hi" };
      const isMissing = (error) => APICallError.isInstance(error) && error.statusCode === 404;
      await assert.rejects(generateText(wrong), isMissing);
      const errors = [];
      const stream = streamText({ ...wrong, onError: ({ error }) => errors.push(error) });
      await stream.consumeStream();
      assert.ok(errors.length === 1 && isMissing(errors[0]));
    });
  });
}

test("a text is completed", async () => {
  const model = openai.completion("shoal-tiny");
  const asked = { model, prompt: "import", maxOutputTokens: 8, temperature: 0 };
  const { text } = await generateText(asked);
  assert.ok(text);
  assert.equal(await streamText(asked).text, text);
});

test("texts are embedded", async () => {
  const embedder = createOpenAI({ ...settings, baseURL: process.env.SHOAL_POOLING_URL });
  const model = embedder.embedding("shoal-tiny");
  const { embeddings } = await embedMany({ model, values: ["one text", "another"] });
  assert.deepEqual(embeddings.map((each) => each.length > 1), [true, true]);
});
