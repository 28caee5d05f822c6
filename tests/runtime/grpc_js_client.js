// Calls a server with grpc-js: node grpc_js_client.js ADDRESS PROTO. Exits with 0 when every answer was right.
const assert = require("node:assert");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, proto] = process.argv.slice(2);
const definition = loader.loadSync(proto, { longs: Number, keepCase: true, defaults: true });
const { GRPCInferenceService } = grpc.loadPackageDefinition(definition).inference;
const client = new GRPCInferenceService(address, grpc.credentials.createInsecure());
const call = (method, request) =>
  new Promise((resolve, reject) =>
    client[method](request, (error, answer) => (error ? reject(error) : resolve(answer))));
const request = (id, values) => ({
  model_name: "double",
  id,
  inputs: [{ name: "x", datatype: "FP32", shape: [1, 4] }],
  raw_input_contents: [Buffer.from(Float32Array.from(values).buffer)],
});
const floats = (bytes) => [...new Float32Array(Uint8Array.from(bytes).buffer)];

async function main() {
  assert((await call("ServerReady", {})).ready);
  assert.strictEqual((await call("ModelMetadata", { name: "double" })).inputs[0].datatype, "FP32");
  const answers = await Promise.all([1, 2, 3, 4, 5].map((n) => call("ModelInfer", request(`${n}`, [n, 0, 0, 1]))));
  answers.forEach((answer, at) => {
    assert.strictEqual(answer.id, `${at + 1}`);
    assert.deepStrictEqual(floats(answer.raw_output_contents[0]), [2 * at + 2, 0, 0, 2]);
  });
  await assert.rejects(call("ModelInfer", { ...request("", [1]), model_name: "nobody" }), { code: grpc.status.NOT_FOUND });
  const stream = client.ModelStreamInfer();
  const streamed = [];
  stream.on("data", (answer) => streamed.push(answer));
  const ended = new Promise((resolve, reject) => stream.on("end", resolve).on("error", reject));
  stream.write(request("a", [1, 2, 3, 4]));
  stream.write(request("b", [1]));
  stream.end();
  await ended;
  assert.deepStrictEqual(floats(streamed[0].infer_response.raw_output_contents[0]), [2, 4, 6, 8]);
  assert.match(streamed[1].error_message, /takes 16 bytes, but 4/);
  client.close();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
