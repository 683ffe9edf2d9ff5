// OpenAI's own client for Node, unchanged.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI, { toFile } from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ maxRetries: 0 });
const embedder = new OpenAI({ baseURL: process.env.SHOAL_POOLING_URL, maxRetries: 0 });
const model = "shoal-tiny";
const asked = { model, temperature: 0 };
const Numbers = z.object({ a: z.number().int(), b: z.number().int() });
const parameters = z.toJSONSchema(Numbers);
const multiply = {
  name: "multiply",
  description: "Multiplies two numbers.",
  parameters,
  function: ({ a, b }) => String(a * b),
  parse: (text) => Numbers.parse(JSON.parse(text)),
};

test("a chat is streamed as it is given whole", async () => {
  const messages = [{ role: "user", content: "What is 12 + 30?" }];
  const whole = await client.chat.completions.create({ ...asked, messages });
  const stream = client.chat.completions.stream({ ...asked, messages });
  assert.match(whole.choices[0].message.content, /42/);
  assert.equal(await stream.finalContent(), whole.choices[0].message.content);
});

test("a loop of tools ends with an answer", async () => {
  const runner = client.chat.completions.runTools({
    ...asked,
    messages: [{ role: "user", content: "What is 1234 * 56?" }],
    tools: [{ type: "function", function: multiply }],
  });
  assert.match(await runner.finalContent(), /69104/);
});

test("a response is streamed, kept, gone on from and deleted", async () => {
  const stream = client.responses.stream({ ...asked, input: "What is 12 + 30?" });
  const kinds = [];
  for await (const event of stream) kinds.push(event.type);
  const first = await stream.finalResponse();
  assert.equal(kinds[0], "response.created");
  assert.equal(kinds.at(-1), "response.completed");
  assert.match(first.output_text, /42/);
  assert.equal((await client.responses.retrieve(first.id)).output_text, first.output_text);
  const next = { input: "What is 1 + 1?", previous_response_id: first.id };
  assert.match((await client.responses.create({ ...asked, ...next })).output_text, /2/);
  await client.responses.delete(first.id);
  await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
});

test("a response becomes an object", async () => {
  const Person = z.object({ name: z.string(), age: z.number().int(), city: z.string() });
  const reply = await client.responses.parse({
    ...asked,
    input: "As JSON: Ada is 31 and lives in Rome.",
    text: { format: zodTextFormat(Person, "person") },
  });
  assert.deepEqual(reply.output_parsed, { name: "Ada", age: 31, city: "Rome" });
});

test("embeddings are the same in both encodings", async () => {
  const texts = { model, input: ["one text", "another"] };
  const decoded = await embedder.embeddings.create(texts); // it asks for base64 by itself
  const floats = await embedder.embeddings.create({ ...texts, encoding_format: "float" });
  for (const [index, { embedding }] of decoded.data.entries()) {
    const other = floats.data[index].embedding;
    assert.equal(embedding.length, other.length);
    assert.ok(embedding.every((value, place) => Math.abs(value - other[place]) < 1e-5));
    assert.ok(Math.abs(Math.hypot(...embedding) - 1) < 1e-5);
  }
});

test("a batch is answered", async () => {
  const body = { ...asked, input: "What is 12 + 30?" };
  const line = { custom_id: "one", method: "POST", url: "/v1/responses", body };
  const file = await client.files.create({
    file: await toFile(Buffer.from(JSON.stringify(line)), "in.jsonl"),
    purpose: "batch",
  });
  let batch = await client.batches.create({
    input_file_id: file.id,
    endpoint: "/v1/responses",
    completion_window: "24h",
  });
  while (!["completed", "failed"].includes(batch.status)) {
    await new Promise((done) => setTimeout(done, 100));
    batch = await client.batches.retrieve(batch.id);
  }
  const output = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
  assert.match(output.response.body.output[0].content[0].text, /42/);
});

test("an error is of its class", async () => {
  const wrong = client.responses.create({ ...asked, input: "Hi", temperature: 9 });
  await assert.rejects(wrong, (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
});
