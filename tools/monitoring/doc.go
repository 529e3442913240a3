// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package monitoring tests the chart's dashboard and alerts: Prometheus' own engine evaluates each query over series of the metrics
// that agent and operator have.
package monitoring
