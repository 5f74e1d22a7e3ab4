"use strict";

// Runs a model that `megakit/models/export.py` traced. A tensor is { shape, data }, with 64-bit
// numbers.

// The operations by name. Arguments: the operation's settings, in which `shape` is the output's
// shape, and the input tensors. Each operation returns the numbers of the output.
const OPERATIONS = (() => {
  const each = (change) => (settings, [x]) => x.data.map(change);
  const sigmoid = (v) => 1 / (1 + Math.exp(-v));

  function erf(v) { // Abramowitz and Stegun 7.1.26: the error is below 1.5e-7, like that of float32
    const t = 1 / (1 + 0.3275911 * Math.abs(v));
    const factors = [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592];
    const sum = factors.reduce((total, factor) => (total + factor) * t, 0);
    return Math.sign(v) * (1 - sum * Math.exp(-v * v));
  }

  // Returns, for each output number, the index of the input number that is broadcast to it.
  function places(from, to) {
    const shape = [...Array(to.length - from.length).fill(1), ...from];
    let found = [0], stride = 1;
    const strides = shape.map(() => 0);
    for (let axis = shape.length - 1; axis >= 0; axis--) {
      strides[axis] = shape[axis] === 1 ? 0 : stride;
      stride *= shape[axis];
    }
    to.forEach((size, axis) => {
      const steps = Array.from({ length: size }, (_, i) => i * strides[axis]);
      found = found.flatMap((place) => steps.map((step) => place + step));
    });
    return found;
  }

  const pairs = (combine) => ({ shape }, [a, b]) => {
    const ofA = places(a.shape, shape), ofB = places(b.shape, shape);
    return Float64Array.from(ofA, (place, i) => combine(a.data[place], b.data[ofB[i]]));
  };

  function linear({ shape }, [x, weight, bias]) {
    const [outs, ins] = weight.shape;
    return Float64Array.from({ length: shape.reduce((a, b) => a * b, 1) }, (_, i) => {
      const row = Math.floor(i / outs) * ins, column = i % outs;
      let sum = bias ? bias.data[column] : 0;
      for (let k = 0; k < ins; k++) sum += x.data[row + k] * weight.data[column * ins + k];
      return sum;
    });
  }

  // Applies `change` to each group of `length` successive numbers.
  function inGroups(data, length, change) {
    const result = new Float64Array(data.length);
    for (let start = 0; start < data.length; start += length) {
      result.set(change(data.subarray(start, start + length)), start);
    }
    return result;
  }

  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

  function layerNorm({ size, eps }, [x, weight, bias]) {
    return inGroups(x.data, size, (values) => {
      const middle = mean(values);
      const deviation = Math.sqrt(mean(values.map((v) => (v - middle) ** 2)) + eps);
      return values.map((v, i) =>
        ((v - middle) / deviation) * (weight ? weight.data[i] : 1) + (bias ? bias.data[i] : 0));
    });
  }

  return {
    linear,
    layer_norm: layerNorm,
    softmax: ({ shape }, [x]) => inGroups(x.data, shape.at(-1), softmax),
    reshape: (settings, [x]) => x.data,
    relu: each((v) => Math.max(v, 0)),
    gelu: each((v) => (v / 2) * (1 + erf(v / Math.SQRT2))),
    gelu_tanh: each((v) =>
      (v / 2) * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (v + 0.044715 * v ** 3)))),
    silu: each((v) => v * sigmoid(v)),
    tanh: each(Math.tanh),
    sigmoid: each(sigmoid),
    neg: each((v) => -v),
    add: pairs((a, b) => a + b),
    sub: pairs((a, b) => a - b),
    mul: pairs((a, b) => a * b),
    div: pairs((a, b) => a / b),
  };
})();

function softmax(values) {
  const greatest = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const exponentials = values.map((v) => Math.exp(v - greatest));
  const total = exponentials.reduce((a, b) => a + b, 0);
  return exponentials.map((v) => v / total);
}

// Reads the text that `embed_graph` of `mnist/report_frame.py` writes into a page. Returns a
// function that maps the numbers of an input to the numbers of each output, by output name.
function readGraph(text) {
  const { graph, weights } = JSON.parse(text);
  const constants = Object.fromEntries(Object.entries(weights).map(([name, { shape, float32 }]) => {
    const bytes = Uint8Array.from(atob(float32), (letter) => letter.charCodeAt(0));
    return [name, { shape, data: Float64Array.from(new Float32Array(bytes.buffer)) }];
  }));
  return (input) => {
    const tensors = { ...constants };
    tensors[graph.input] = { shape: graph.shape, data: Float64Array.from(input) };
    const tensor = (name) => (typeof name === "number" ? { shape: [], data: [name] } : tensors[name]);
    for (const { op, inputs, output, shape, ...settings } of graph.operations) {
      tensors[output] = { shape, data: OPERATIONS[op]({ shape, ...settings }, inputs.map(tensor)) };
    }
    return Object.fromEntries(
      Object.entries(graph.outputs).map(([name, value]) => [name, Array.from(tensors[value].data)]));
  };
}
