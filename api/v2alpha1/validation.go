// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package v2alpha1

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Limits of the schema.
const (
	maxRegistrationSeconds  = 3600
	maxRegistrationAttempts = 100000
	maxIfaces               = 64
	maxVfCount              = 4096
	maxDummyCount           = 1024
	maxPools                = 32
	maxTotalIfNames         = 512
	maxDomainLength         = 63
	maxIfNameLength         = 15
	maxPCIAddrLength        = 16
	maxPCIIDLength          = 6
	maxDriverLength         = 64
	maxAttributes           = 8
	maxAttributeLength      = 64
	maxSelectorLabels       = 64
	maxSelectorExpressions  = 16
	maxSelectorValues       = 1024
	maxLabelKeyLength       = 317
	maxLabelValueLength     = 63

	// maxSlicePoolLength is the API's limit for the name of a pool in a
	// ResourceSlice, which is the node's name, a slash, the pool's name.
	maxSlicePoolLength = 253
)

// What the schema's rules say when they are broken, also said here.
const (
	poolNameMessage = "the node's name and the pool's name, joined by a slash, must be at most 253 characters"
	ifNamesMessage  = "an ifNames value names one device and may be in the filter of one pool only"
	totalMessage    = "the ifNames of all pools together may have at most 512 values"

	attributeNameMessage     = "an attribute's name must be an identifier of at most 32 letters, digits and '_' that does not begin with a digit, with or without a DNS subdomain of at most 63 characters and '/' before it"
	attributeReservedMessage = "the driver's own attributes (pool, deviceManager, ifName, kernelIfName, mtu, mac, pfName, vfID, vendor, deviceID, driver, linkSpeed, iommuGroup, rdma, rdmaDevice, virtual, vlan, podMTU) and those of kubernetes.io, k8s.io and cni.cncf.io are not the administrator's"
	attributeDomainMessage   = "an attribute of the driver's domain is named without it"

	labelKeyLengthMessage = "a label key must have 1 to 317 characters"
	valuesNeededMessage   = "must have at least one value for the operators In and NotIn"
	valuesRefusedMessage  = "must be left out for the operators Exists and DoesNotExist"
)

// format is a rule for a string.
type format struct {
	maxLength int
	pattern   *regexp.Regexp
	refuse    []string
	message   string
}

var (
	domainFormat = format{
		maxLength: maxDomainLength,
		pattern:   regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`),
		message:   "must be a DNS subdomain: lower case letters, digits, '-' and '.', each part beginning and ending with a letter or digit",
	}

	// ifNameFormat is what the kernel's dev_valid_name accepts, less what is
	// not printable ASCII.
	ifNameFormat = format{
		maxLength: maxIfNameLength,
		pattern:   regexp.MustCompile(`^[!-.0-9;-~]+$`),
		refuse:    []string{".", ".."},
		message:   "must be an interface name: 1 to 15 printable ASCII characters without space, '/' and ':', not '.' or '..'",
	}
	pciAddrFormat = format{
		maxLength: maxPCIAddrLength,
		pattern:   regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f][.][0-7]$`),
		message:   "must be a PCI address as the kernel writes it, domain:bus:device.function in lower case hexadecimal, for example 0000:03:00.1",
	}
	pciIDFormat = format{
		maxLength: maxPCIIDLength,
		pattern:   regexp.MustCompile(`^0x[0-9a-f]{4}$`),
		message:   "must be a PCI identifier: 0x and four lower case hexadecimal digits, for example 0x8086",
	}
	driverFormat = format{
		maxLength: maxDriverLength,
		pattern:   regexp.MustCompile(`^[A-Za-z0-9._-]+$`),
		message:   "must be the name of a kernel driver: letters, digits, '.', '_' and '-'",
	}
	labelKeyFormat = format{
		maxLength: maxLabelKeyLength,
		pattern:   regexp.MustCompile(`^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`),
		message:   "must be a label key: a name of at most 63 letters, digits, '-', '_' and '.', beginning and ending with a letter or digit, with or without a DNS subdomain and '/' before it",
	}
	labelValueFormat = format{
		maxLength: maxLabelValueLength,
		pattern:   regexp.MustCompile(`^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$`),
		message:   "must be a label value: empty, or letters, digits, '-', '_' and '.', beginning and ending with a letter or digit",
	}
)

// Names of attributes, and those that mean something already.
var (
	attributeName     = regexp.MustCompile(`^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z_][A-Za-z0-9_]{0,31}$`)
	attributeReserved = regexp.MustCompile(`^(pool|deviceManager|ifName|kernelIfName|mtu|mac|pfName|vfID|vendor|deviceID|driver|linkSpeed|iommuGroup|rdma|rdmaDevice|virtual|vlan|podMTU|(.*[.])?(kubernetes[.]io|k8s[.]io|cni[.]cncf[.]io)/.*)$`)
)

// selectorOperators are the operators that a node selector may have.
var selectorOperators = []metav1.LabelSelectorOperator{
	metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn, metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist,
}

// What a pool may say of claims, and of the taints of its devices.
var (
	claimParameters = []string{ClaimsAny, ClaimsNetworkOnly, ClaimsNone}
	faultEffects    = []string{FaultEffectNoSchedule, FaultEffectNoExecute}
)

// deviceManagers are the managers that a filter may name.
var deviceManagers = []string{"sr-iov", "dummy"}

// Validate returns what is wrong with a node config, or nil. The error names
// every field at fault and what it may hold.
func (c *CiliumNetworkDriverNodeConfig) Validate() error {
	spec := field.NewPath("spec")
	errs := c.Spec.ValidateFields(spec)
	for i, pool := range c.Spec.Pools {
		if len(c.Name)+1+len(pool.PoolName) > maxSlicePoolLength {
			errs = append(errs, field.Invalid(spec.Child("pools").Index(i).Child("name"), pool.PoolName, poolNameMessage))
		}
	}
	return errs.ToAggregate()
}

// Validate returns what is wrong with a cluster config, or nil. The error
// names every field at fault and what it may hold.
func (c *CiliumNetworkDriverClusterConfig) Validate() error {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	if c.Spec.NodeSelector != nil {
		errs = c.Spec.NodeSelector.validate(spec.Child("nodeSelector"))
	}
	errs = append(errs, c.Spec.Spec.ValidateFields(spec.Child("spec"))...)
	return errs.ToAggregate()
}

func (s *LabelSelector) validate(path *field.Path) field.ErrorList {
	matchLabels := path.Child("matchLabels")
	errs := validateLength(matchLabels, len(s.MatchLabels), maxSelectorLabels)
	for _, key := range slices.Sorted(maps.Keys(s.MatchLabels)) {
		if len(key) == 0 || len(key) > maxLabelKeyLength {
			errs = append(errs, field.Invalid(matchLabels, key, labelKeyLengthMessage))
		} else {
			errs = append(errs, labelKeyFormat.validate(matchLabels, key)...)
		}
		errs = append(errs, labelValueFormat.validate(matchLabels.Key(key), string(s.MatchLabels[key]))...)
	}
	expressions := path.Child("matchExpressions")
	errs = append(errs, validateLength(expressions, len(s.MatchExpressions), maxSelectorExpressions)...)
	for i, requirement := range s.MatchExpressions {
		errs = append(errs, requirement.validate(expressions.Index(i))...)
	}
	return errs
}

func (r *LabelSelectorRequirement) validate(path *field.Path) field.ErrorList {
	errs := labelKeyFormat.validate(path.Child("key"), r.Key)
	values := path.Child("values")
	switch r.Operator {
	case metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn:
		if len(r.Values) == 0 {
			errs = append(errs, field.Invalid(values, r.Values, valuesNeededMessage))
		}
	case metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist:
		if len(r.Values) > 0 {
			errs = append(errs, field.Invalid(values, r.Values, valuesRefusedMessage))
		}
	default:
		errs = append(errs, field.NotSupported(path.Child("operator"), r.Operator, selectorOperators))
	}
	errs = append(errs, validateLength(values, len(r.Values), maxSelectorValues)...)
	for i, value := range r.Values {
		errs = append(errs, labelValueFormat.validate(values.Index(i), string(value))...)
	}
	return errs
}

// Validate returns what is wrong with a node config's spec, or nil: the rules
// of the schema, for a spec that did not pass it or passed an older one. It
// expects a spec with defaults.
func (s *CiliumNetworkDriverNodeConfigSpec) Validate() error {
	return s.ValidateFields(field.NewPath("spec")).ToAggregate()
}

// ValidateFields is Validate for a spec found under path, with one error for
// each field at fault.
func (s *CiliumNetworkDriverNodeConfigSpec) ValidateFields(path *field.Path) field.ErrorList {
	errs := domainFormat.validate(path.Child("driverName"), s.DriverName)
	errs = append(errs, validateRange(path.Child("draRegistrationRetryInterval"), s.DraRegistrationRetryInterval, 1, maxRegistrationSeconds)...)
	errs = append(errs, validateRange(path.Child("draRegistrationTimeout"), s.DraRegistrationTimeout, 1, maxRegistrationSeconds)...)
	errs = append(errs, validateRange(path.Child("draRegistrationMaxAttempts"), s.DraRegistrationMaxAttempts, 1, maxRegistrationAttempts)...)
	if managers := s.DeviceManagerConfigs; managers != nil {
		errs = append(errs, managers.validate(path.Child("deviceManagerConfigs"))...)
	}
	for i, pool := range s.Pools {
		for name := range pool.Attributes {
			if strings.HasPrefix(name, s.DriverName+"/") {
				errs = append(errs, field.Invalid(path.Child("pools").Index(i).Child("attributes"), name, attributeDomainMessage))
			}
		}
	}
	return append(errs, validatePools(path.Child("pools"), s.Pools)...)
}

func (m *CiliumNetworkDriverDeviceManagerConfig) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if m.Dummy != nil {
		errs = append(errs, validateRange(path.Child("dummy", "count"), m.Dummy.Count, 0, maxDummyCount)...)
	}
	if m.SRIOV == nil {
		return errs
	}
	path = path.Child("sriov", "ifaces")
	errs = append(errs, validateLength(path, len(m.SRIOV.Ifaces), maxIfaces)...)
	seen := map[string]bool{}
	for i, iface := range m.SRIOV.Ifaces {
		name := path.Index(i).Child("ifName")
		if seen[iface.IfName] {
			errs = append(errs, field.Duplicate(name, iface.IfName))
		}
		seen[iface.IfName] = true
		errs = append(errs, ifNameFormat.validate(name, iface.IfName)...)
		errs = append(errs, validateRange(path.Index(i).Child("vfCount"), iface.VfCount, 0, maxVfCount)...)
	}
	return errs
}

func validatePools(path *field.Path, pools []CiliumNetworkDriverDevicePoolConfig) field.ErrorList {
	errs := validateLength(path, len(pools), maxPools)
	seen := map[string]bool{}
	owner := map[string]int{} // ifNames value to the first pool that names it
	total := 0
	for i, pool := range pools {
		name := path.Index(i).Child("name")
		if seen[pool.PoolName] {
			errs = append(errs, field.Duplicate(name, pool.PoolName))
		}
		seen[pool.PoolName] = true
		errs = append(errs, domainFormat.validate(name, pool.PoolName)...)
		if !slices.Contains(claimParameters, pool.Claims) {
			errs = append(errs, field.NotSupported(path.Index(i).Child("claims"), pool.Claims, claimParameters))
		}
		if !slices.Contains(faultEffects, pool.FaultEffect) {
			errs = append(errs, field.NotSupported(path.Index(i).Child("faultEffect"), pool.FaultEffect, faultEffects))
		}
		errs = append(errs, validateAttributes(path.Index(i).Child("attributes"), pool.Attributes)...)

		if pool.Filter == nil {
			continue
		}
		filter := path.Index(i).Child("filter")
		errs = append(errs, pool.Filter.validate(filter)...)
		total += len(pool.Filter.IfNames)
		for j, ifName := range pool.Filter.IfNames {
			first, taken := owner[ifName]
			if !taken {
				owner[ifName] = i
			} else if first != i {
				errs = append(errs, field.Invalid(filter.Child("ifNames").Index(j), ifName, fmt.Sprintf("%s: pool %q has it too", ifNamesMessage, pools[first].PoolName)))
			}
		}
	}
	if total > maxTotalIfNames {
		errs = append(errs, field.Invalid(path, total, totalMessage))
	}
	return errs
}

func validateAttributes(path *field.Path, attributes map[string]PoolAttribute) field.ErrorList {
	errs := validateLength(path, len(attributes), maxAttributes)
	for _, name := range slices.Sorted(maps.Keys(attributes)) {
		if !attributeName.MatchString(name) || strings.Index(name, "/") > maxDomainLength {
			errs = append(errs, field.Invalid(path, name, attributeNameMessage))
		}
		if attributeReserved.MatchString(name) {
			errs = append(errs, field.Invalid(path, name, attributeReservedMessage))
		}
		if utf8.RuneCountInString(string(attributes[name])) > maxAttributeLength {
			errs = append(errs, field.TooLong(path.Key(name), attributes[name], maxAttributeLength))
		}
	}
	return errs
}

func (f *CiliumNetworkDriverDeviceFilter) validate(path *field.Path) field.ErrorList {
	errs := validateSet(path.Child("deviceManagers"), f.DeviceManagers, 8, func(path *field.Path, value string) field.ErrorList {
		for _, manager := range deviceManagers {
			if value == manager {
				return nil
			}
		}
		return field.ErrorList{field.NotSupported(path, value, deviceManagers)}
	})
	for _, set := range []struct {
		field    string
		values   []string
		maxItems int
		format   format
	}{
		{"ifNames", f.IfNames, 64, ifNameFormat},
		{"pfNames", f.PfNames, 64, ifNameFormat},
		{"parentIfNames", f.ParentIfNames, 64, ifNameFormat},
		{"pciAddrs", f.PciAddrs, 256, pciAddrFormat},
		{"vendorIDs", f.VendorIDs, 64, pciIDFormat},
		{"deviceIDs", f.DeviceIDs, 64, pciIDFormat},
		{"drivers", f.Drivers, 64, driverFormat},
	} {
		errs = append(errs, validateSet(path.Child(set.field), set.values, set.maxItems, set.format.validate)...)
	}
	return errs
}

func (f format) validate(path *field.Path, value string) field.ErrorList {
	if utf8.RuneCountInString(value) > f.maxLength {
		return field.ErrorList{field.TooLong(path, value, f.maxLength)}
	}
	valid := f.pattern.MatchString(value)
	for _, refused := range f.refuse {
		valid = valid && value != refused
	}
	if valid {
		return nil
	}
	return field.ErrorList{field.Invalid(path, value, f.message)}
}

func validateRange(path *field.Path, value, lowest, highest int32) field.ErrorList {
	if lowest <= value && value <= highest {
		return nil
	}
	return field.ErrorList{field.Invalid(path, value, fmt.Sprintf("must be %d to %d", lowest, highest))}
}

func validateLength(path *field.Path, length, highest int) field.ErrorList {
	if length <= highest {
		return nil
	}
	return field.ErrorList{field.TooMany(path, length, highest)}
}

func validateSet(path *field.Path, values []string, maxItems int, validate func(*field.Path, string) field.ErrorList) field.ErrorList {
	errs := validateLength(path, len(values), maxItems)
	seen := map[string]bool{}
	for i, value := range values {
		if seen[value] {
			errs = append(errs, field.Duplicate(path.Index(i), value))
		}
		seen[value] = true
		errs = append(errs, validate(path.Index(i), value)...)
	}
	return errs
}
